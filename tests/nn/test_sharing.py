"""Law 5: a shared projection exists once, in memory, in a checkpoint and across processes."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from comparison import METHODS, PROJECTIONS, E
from torch import nn

from linformers import LinearMultiheadAttention, make_projection

H, MAX_LEN, K, DEPTH = 3, 13, 7, 5
WIDTH = 2 * H


class Stack(nn.Module):
    """Layers of attention with residuals; with layerwise sharing it owns the one projection and passes it to all."""

    def __init__(self, sharing, method="learnable", depth=DEPTH):
        super().__init__()
        shared = None
        if sharing == "layerwise":
            shared = self.projection = make_projection(MAX_LEN, K, heads=H, sharing=sharing, method=method)
        sizes = {} if shared is not None else {"seq_len": MAX_LEN, "proj_k": K, "method": method}
        self.layers = nn.ModuleList(
            LinearMultiheadAttention(WIDTH, H, batch_first=True, param_sharing=sharing, projection=shared, **sizes)
            for _ in range(depth)
        )

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return x


def projections(model):
    return [m for m in model.modules() if hasattr(m, "count")]


@pytest.mark.parametrize(
    ("sharing", "count"), [("none", 2 * DEPTH * H), ("headwise", 2 * DEPTH), ("kv", DEPTH), ("layerwise", 1)]
)
@pytest.mark.parametrize("method", ["learnable", "no_params", "convolution"])
def test_number_of_distinct_projections(sharing, count, method):
    model = Stack(sharing, method)
    assert sum(projection.count for projection in projections(model)) == count
    size = 2 if method == "convolution" else MAX_LEN * K
    stored = {
        name: x for name, x in model.state_dict().items() if name.endswith(("projection.weight", "projection.kernel"))
    }
    assert sum(x.numel() for x in stored.values()) == count * size
    assert len({x.data_ptr() for x in stored.values()}) == len(stored) == (1 if sharing == "layerwise" else DEPTH)
    parameters = list(model.parameters())
    assert len({id(p) for p in parameters}) == len(parameters) == len(list(model.parameters(recurse=True)))
    trained = sum(p.numel() for name, p in model.named_parameters() if "projection." in name and "out" not in name)
    assert trained == (0 if method == "no_params" else count * size)


def test_gradient_of_a_shared_projection_comes_from_every_layer():
    model = Stack("layerwise")
    x = torch.randn(2, MAX_LEN, WIDTH)
    model(x).sum().backward()
    whole = model.projection.weight.grad.clone()
    for layer in model.layers:
        apart = copy.deepcopy(model)
        index = list(model.layers).index(layer)
        object.__setattr__(apart.layers[index], "projection", copy.deepcopy(apart.projection))
        apart.zero_grad()
        apart(x).sum().backward()
        own = apart.layers[index].projection.weight.grad
        assert own.any()
        torch.testing.assert_close(apart.projection.weight.grad + own, whole)


def test_handed_projection_is_neither_registered_nor_copied():
    projection = make_projection(MAX_LEN, K, sharing="kv")
    layer = LinearMultiheadAttention(WIDTH, H, projection=projection)
    assert layer.projection is projection
    assert projection not in list(layer.modules())
    assert set(layer.state_dict()) == set(nn.MultiheadAttention(WIDTH, H).state_dict())
    start = projection.weight.detach().clone()
    layer.reset_parameters()
    layer.double()
    assert torch.equal(projection.weight, start)
    assert (layer.seq_len, layer.proj_k) == (MAX_LEN, K)


@pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("method", METHODS)
def test_copies_of_the_owner_share_among_themselves(method, round_trip):
    model = Stack("layerwise", method)
    again = round_trip(model)
    assert again.projection is not model.projection
    assert all(layer.projection is again.projection for layer in again.layers)
    x = torch.randn(2, 11, WIDTH)
    assert torch.equal(again(x), model(x))
    for p in again.projection.parameters():
        nn.init.zeros_(p)
    assert torch.equal(model(x), round_trip(model)(x))


def test_moving_the_owner_moves_it_for_all():
    model = Stack("layerwise", "no_params").to(torch.bfloat16)
    assert model(torch.randn(2, 11, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    on_meta = Stack("layerwise").to("meta")
    assert on_meta(torch.empty(2, 11, WIDTH, device="meta")).shape == (2, 11, WIDTH)


@pytest.mark.parametrize(("method", "sharing"), [*PROJECTIONS, *((method, "layerwise") for method in METHODS)])
def test_every_sharing_survives_safetensors(tmp_path, sharing, method):
    model, x = Stack(sharing, method), torch.randn(2, 11, WIDTH)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "file")  # refuses tensors that share memory
    safetensors.torch.save_model(model, tmp_path / "model")
    stored = safetensors.torch.load_file(tmp_path / "model")
    assert set(stored) == set(safetensors.torch.load_file(tmp_path / "file")) == set(model.state_dict())
    if sharing == "layerwise" and method in ("learnable", "no_params"):
        assert [name for name in stored if name.endswith("projection.weight")] == ["projection.weight"]
    fresh = [Stack(sharing, method) for _ in range(2)]
    fresh[0].load_state_dict(safetensors.torch.load_file(tmp_path / "file"))
    safetensors.torch.load_model(fresh[1], tmp_path / "model")
    for again in fresh:
        assert torch.equal(again(x), model(x))


DDP = """
    import sys
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.nn.parallel import DistributedDataParallel
    from model_cases import C, make_causal_lm, make_encdec, source_ids, tokens
    from test_sharing import MAX_LEN, WIDTH, Stack

    def work(rank, store):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        half = slice(2 * rank, 2 * rank + 2)
        for sharing in ("layerwise", "none"):
            for method in ("learnable", "no_params"):
                torch.manual_seed(0)
                x = torch.randn(4, MAX_LEN, WIDTH, dtype=torch.float64)
                mask = torch.arange(MAX_LEN) >= torch.tensor([13, 7, 3, 11])[:, None]
                compare(Stack(sharing, method).double(), [[x, mask]], half)
            for options in ({}, {"checkpoint_level": "C1"}, {"reversible": True}):
                torch.manual_seed(0)
                lengths = (3 * C, C, 3 * C)  # with and without blocks that are compressed
                compare(make_causal_lm(parameter_sharing=sharing, **options), [[tokens(4, n)] for n in lengths], half)
                ids = [[source_ids(4, n), tokens(4, n)] for n in lengths]
                compare(make_encdec(parameter_sharing=sharing, **options), ids, half)
        dist.destroy_process_group()

    def gradients(model, run, inputs):
        model.zero_grad()
        run(*inputs).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def compare(model, batches, half):
        parallel = DistributedDataParallel(model)
        for inputs in batches:
            whole = gradients(model, model, inputs)
            found = gradients(model, parallel, [x[half] for x in inputs])
            # the mean over processes of sums over samples
            torch.testing.assert_close({name: 2 * gradient for name, gradient in found.items()}, whole)

    if __name__ == "__main__":
        mp.spawn(work, (f"{sys.argv[1]}/store",), nprocs=2)
        print("equal")
"""


def test_two_processes_have_the_gradients_of_one(tmp_path):
    """For every sharing mode and at any length: DDP waits forever for the gradient of a parameter that one process does not use."""
    script = tmp_path / "ddp.py"
    script.write_text(textwrap.dedent(DDP))
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PYTHONPATH": os.pathsep.join([here, *sys.path]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": "",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.mark.parametrize("name", ["head", "", "NONE", "layer", None])
def test_unknown_sharing_is_an_error(name):
    with pytest.raises(ValueError, match=f"must be one of 'none', 'headwise', 'kv', 'layerwise'; got {name!r}"):
        LinearMultiheadAttention(E, 2, param_sharing=name)
