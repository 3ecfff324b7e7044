"""Running in chunks equals running at once: projections, keys and values, and whole stacks (law 7)."""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from comparison import PROJECTIONS, make_layer
from covering import covering
from model_cases import CHANNELS, ENCODERS, N, by_name, holes, make_lm, make_stack, tokens
from torch import Tensor

import linformers.models.chunks
import linformers.models.stack
import linformers.ops.cpu
from linformers import Linformer, make_projection, stream
from linformers.nn.maps import Affine
from linformers.nn.memory import make_memory
from linformers.nn.parts import MemoryInChunks

METHODS = ("learnable", "no_params", "convolution", "mean", "max")
STACKS = {
    name: options
    for name, options in ENCODERS.items()
    if not (name.startswith(("full", "window", "reversible", "opened")) or name in ("local", "content, reversible"))
}


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def chunks_of(n: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < n:
        size = sizes[start % len(sizes)]
        yield start, min(start + size, n)
        start += size


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "max_len, k, length", [(23, 5, 23), (23, 5, 13), (24, 6, 24), (24, 6, 17), (7, 11, 7), (24, 24, 20)]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:k = 11 slots")
def test_a_projection_in_chunks(method: str, max_len: int, k: int, length: int, masked: bool) -> None:
    shared = method in ("mean", "max")
    for heads, use in ((1, k), (1, k - 2), (3, k)):
        if heads == 3 and shared:
            continue
        projection = make_projection(max_len, k, heads=heads, sharing="none", method=method).double()
        x = torch.randn(2, heads, length, 3, dtype=torch.float64)
        keep = holes(2, length) if masked else None
        for part in (0, 1):
            for sizes in ([4], [3, 5, 2], [1], [100]):
                sums = projection.begin(x, length, use)
                with torch.no_grad():
                    for start, stop in chunks_of(length, sizes):
                        some = None if keep is None else keep[:, start:stop]
                        projection.add_chunk(sums, x[:, :, start:stop], start, some, part, use)
                content, mass, kept, _ = projection.finish(sums)
                whole = projection(x, keep, part, use)
                same(content, whole.content)
                if whole.mass is not None:
                    same(mass(), whole.mass().expand_as(mass()))
                real = torch.ones(2, content.shape[2], dtype=torch.bool)
                assert torch.equal(
                    real if kept is None else kept, real if whole.keep is None else whole.keep.expand_as(real)
                )


def test_chunks_from_several_processes_add_up() -> None:
    projection = make_projection(23, 5, sharing="kv").double()
    x = torch.randn(2, 1, 23, 3, dtype=torch.float64)
    halves = []
    for start, stop in ((11, 23), (0, 11)):
        sums = projection.begin(x, 23)
        with torch.no_grad():
            projection.add_chunk(sums, x[:, :, start:stop], start)
        halves.append(sums)
    same(halves[0].content + halves[1].content, projection(x).content)


def test_a_user_defined_module_cannot_run_in_chunks() -> None:
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.Unflatten(1, (2, 3)))
    projection = make_projection(4, 2, method=own)
    x = torch.randn(1, 1, 4, 3)
    with pytest.raises(ValueError, match="Custom needs its whole input at once"):
        projection.add_chunk(projection.begin(x, 4), x, 0)


@pytest.mark.parametrize(**covering(method__sharing=PROJECTIONS, rotary=[False, True]))
def test_keys_and_values_in_chunks(method: str, sharing: str, rotary: bool) -> None:
    maps = [Affine(torch.randn(6, 5).double(), torch.randn(6).double()) for _ in range(2)]
    projection = make_projection(23, 7, heads=3, sharing=sharing, method=method).double()
    x, keep = torch.randn(2, 19, 5, dtype=torch.float64), holes(2, 19)
    angles = torch.randn(19, 2, dtype=torch.float64)
    with torch.no_grad():
        whole = make_memory(
            x, x, *maps, projection, heads=3, keep=keep, rotate=(lambda y: y * angles) if rotary else None
        )
        shortener = MemoryInChunks(*maps, projection, heads=3, length=19, rotary=rotary)
        for start, stop in chunks_of(19, [5, 3]):
            turn = (lambda y, a=angles[start:stop]: y * a) if rotary else None
            shortener.add(x[:, start:stop], start, keep[:, start:stop], turn)
    for actual, expected in zip(shortener.finish(), whole, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            same(actual.double(), expected.double())


@pytest.mark.parametrize("options", [{}, {"sharing": "kv"}, {"add_bias_kv": True}, {"method": "mean"}])
def test_the_attention_layer_takes_long_queries_in_chunks(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linformers.ops.cpu, "ROWS", 1)  # the smallest chunks there are
    layer = make_layer(seq_len=311, **options)
    for batch_first in (True, False):
        layer.batch_first = batch_first
        x = torch.randn(3, 311, layer.embed_dim, dtype=torch.float64)
        x = x if batch_first else x.transpose(0, 1)
        padding = ~holes(3, 311)
        expected, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)  # with gradients: at once
        with torch.no_grad():
            actual, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
        same(actual, expected)


def test_rows_are_cut_sooner_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linformers.ops.cpu, "ROWS", 1)
    sizes: list[int] = []

    def double(x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return 2 * x

    x = torch.randn(2, 150, 3)
    same(linformers.ops.cpu.by_rows(double, x), 2 * x)
    assert sizes == [150]
    with torch.no_grad():
        same(linformers.ops.cpu.by_rows(double, x), 2 * x)
    assert sizes == [150, 64, 64, 22]


@pytest.mark.parametrize("options", **by_name(STACKS, "encoder, "))
@pytest.mark.parametrize("n", [N, 13, 1])
def test_a_stack_in_chunks(options: dict, n: int) -> None:
    model = make_stack(options).eval()
    x = torch.randn(3, n, CHANNELS, dtype=torch.float64)
    for mask in (None, holes(3, n)) if n > 1 else (None,):
        with torch.no_grad():
            expected = model(x, mask)
        for chunk in (1, 3, 4, 100, None):
            same(stream(model, x, mask, chunk=chunk), expected)


@pytest.mark.parametrize("options", [{}, {"local_kernel": 5, "norm": "pre"}, {"ff_intermediate": 6, "dim_d": 3}])
def test_files_and_iterators(options: dict, tmp_path: Path) -> None:
    model = make_stack(options).eval()
    x, mask = torch.randn(2, 17, CHANNELS, dtype=torch.float64), holes(2, 17)
    with torch.no_grad():
        expected = model(x, mask)
    source = numpy.memmap(tmp_path / "x", dtype=numpy.float64, mode="w+", shape=tuple(x.shape))
    source[:] = x.numpy()
    source.flush()
    read_only = numpy.memmap(tmp_path / "x", dtype=numpy.float64, mode="r", shape=tuple(x.shape))
    target = numpy.memmap(tmp_path / "y", dtype=numpy.float64, mode="w+", shape=tuple(x.shape))
    assert stream(model, read_only, mask, chunk=5, out=target) is target
    same(torch.from_numpy(numpy.array(target)), expected)
    with torch.no_grad():
        plain = model(x)
    same(stream(model, read_only, chunk=5), plain)
    out = torch.empty_like(x)
    assert stream(model, iter(x.split(4, 1)), mask, chunk=5, out=out) is out
    same(out, expected)
    same(stream(model, iter(x.split([1, 1, 6, 9], 1)), mask, chunk=5, length=17), expected)


def test_bfloat16_is_written_to_an_array_of_single_precision() -> None:
    model = make_stack({"local_kernel": 3, "depth": 3}).bfloat16().eval()
    x, mask = torch.randn(2, 17, CHANNELS).bfloat16(), holes(2, 17)
    out = numpy.zeros((2, 17, CHANNELS), dtype=numpy.float32)
    assert stream(model, x.float().numpy(), mask, chunk=5, out=out) is out
    assert torch.equal(torch.from_numpy(out), stream(model, x, mask, chunk=5).float())


def test_a_model_without_parameters() -> None:
    model = Linformer(N, CHANNELS, 7, attention="none", include_ff=False, rotary=True, nhead=5).eval()
    assert not list(model.parameters())
    x = torch.randn(2, 17, CHANNELS)
    assert torch.equal(stream(model, x, chunk=5), x)
    assert torch.equal(stream(model, x.numpy(), chunk=5), x)
    assert torch.equal(stream(model, iter(x.split(4, 1)), length=17), x)
    causal = Linformer(N, CHANNELS, 7, attention="none", include_ff=False, causal=True, nhead=5)
    assert torch.equal(causal.step(x[:, :1], causal.new_state(2)), x[:, :1])


def test_the_input_stays_as_it_was() -> None:
    model, x = make_stack({"local_kernel": 3}).eval(), torch.randn(2, 17, CHANNELS, dtype=torch.float64)
    before = x.clone()
    stream(model, x, chunk=4)
    assert torch.equal(x, before)


def test_long_inputs_run_in_chunks_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linformers.models.chunks, "CHUNK", 64)
    calls = []
    original = linformers.models.stack.run_in_chunks
    monkeypatch.setattr(linformers.models.stack, "run_in_chunks", lambda *a, **o: calls.append(1) or original(*a, **o))
    model = Linformer(512, 8, 8, nhead=2, dim_ff=16, dropout=0.0, dropout_ff=0.0).double().eval()
    x = torch.randn(1, 500, 8, dtype=torch.float64)
    expected = model(x)  # with gradients: at once
    assert not calls
    with torch.no_grad():
        same(model(x), expected)
        assert len(calls) == 1
        same(model(x[:, :100]), model(x[:, :100]))
        assert len(calls) == 1, "a short input"
        handle = model.layers[0].register_forward_hook(lambda *_: None)
        model(x)
        assert len(calls) == 1, "a hook on a layer"
        handle.remove()
        handle = model.projection.register_forward_hook(lambda *_: None)
        model(x)
        assert len(calls) == 1, "a hook on the projection"
        with pytest.raises(ValueError, match="there are hooks on a projection, which sees no chunk; remove them first"):
            stream(model, x)
        handle.remove()
        model(x, need_weights=True)
        model.train()(x)
        assert len(calls) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": "full"}, "attention='full' needs exact keys"),
        ({"attention": "local", "local_window": 3}, "attention='local' needs exact keys"),
        ({"local_window": 3}, "local_window needs exact keys"),
        ({"reversible": True, "norm": "pre"}, "reversible=True"),
        ({"causal": True, "block_size": 3, "dim_k": 14}, "causal=True"),
        ({"context_size": 5}, "context_size"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(make_stack(options).eval(), torch.randn(1, 5, CHANNELS).double())


def test_text_models_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"stream runs a linformers\.Linformer, whose inputs are features; got LinformerLM"
    ):
        stream(make_lm(), tokens(1, N))


def test_bad_input() -> None:
    model = make_stack({})
    x = torch.randn(1, 5, CHANNELS).double()
    with pytest.raises(ValueError, match="call eval"):
        stream(model.train(), x)
    model.eval()
    for run, message in (
        (lambda: stream(model, x[0]), r"\(batch, length, channels=10\), got \(5, 10\)"),
        (lambda: stream(model, x[..., :3]), r"channels=10\), got \(1, 5, 3\)"),
        (lambda: stream(model, torch.zeros(1, N + 1, CHANNELS).double()), f"got a sequence of {N + 1}"),
        (lambda: stream(model, x, chunk=0), "chunk must be at least 1, got 0"),
        (lambda: stream(model, x, torch.ones(1, 4, dtype=torch.bool)), r"\(1, 5\), got \(1, 4\)"),
        (lambda: stream(model, x, out=x[:, :3].clone()), r"out must be .* \(1, 5, 10\), got \(1, 3, 10\)"),
        (lambda: stream(model, iter([x])), "give length, or out"),
        (lambda: stream(model, iter([x]), length=7), "the chunks ended at position 5 of 7"),
        (
            lambda: stream(model, iter([x, x]), length=7),
            r"7 positions in all; got one of shape \(1, 5, 10\) at position 5",
        ),
        (lambda: stream(model, iter([]), length=7), "the chunks ended at position 0 of 7"),
        (
            lambda: stream(model, iter([x, x.expand(3, -1, -1)]), length=10),
            r"\(batch=1, c, channels=10\).* got one of shape \(3, 5, 10\) at position 5",
        ),
        (
            lambda: stream(model, iter([x.expand(3, -1, -1), x]), length=10),
            r"\(batch=3, c, channels=10\).* got one of shape \(1, 5, 10\) at position 5",
        ),
        (lambda: stream(model, iter([x, x[0]]), length=10), r"got one of shape \(5, 10\) at position 5"),
        (
            lambda: stream(model, x, out=torch.zeros(x.shape, dtype=torch.long)),
            "floating-point numbers, got torch.int64",
        ),
        (lambda: stream(model, x, out=numpy.zeros(x.shape, dtype=int)), "floating-point numbers, got int64"),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_the_size_of_a_chunk_keeps_its_activations_in_a_cache() -> None:
    model = Linformer(4096, 512, 64, nhead=8, dim_ff=2048)
    assert model.parts().chunk_length(1) == linformers.models.chunks.CHUNK // 2048
    assert model.parts().chunk_length(4) == linformers.models.chunks.CHUNK // 2048 // 4
