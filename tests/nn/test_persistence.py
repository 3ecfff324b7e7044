"""Law 6: saving, copying, moving, compiling and exporting change nothing."""

import copy
import io
import pickle

import onnxruntime
import pytest
import torch
from comparison import (
    METHODS,
    PROJECTIONS,
    SIZES,
    E,
    assert_close,
    ignore,
    make_inputs,
    make_keep,
    make_layer,
    named,
    outputs_and_gradients,
)
from covering import covering
from torch import nn
from torch.export import Dim

from linformers import LinearMultiheadAttention

MAX_LEN, K = SIZES["N"], SIZES["k"]
GRAPHS = [method for method in METHODS if method != "no_params"]  # whose graph is that of a learned matrix


def detached(tensors):
    return tuple(x.detach() for x in tensors)


# Saving, copying, moving


def through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = make_layer(layer.made_with, layer.param_sharing, add_bias_kv=True)
    assert again.load_state_dict(torch.load(file, weights_only=True)) == ([], [])
    return again


@pytest.mark.parametrize(
    **covering(
        method__sharing=PROJECTIONS,
        round_trip={
            "file": through_a_file,
            "copy": copy.deepcopy,
            "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
        },
    )
)
def test_round_trip_changes_nothing(method, sharing, round_trip):
    layer = make_layer(method, sharing, add_bias_kv=True)
    layer.made_with = method
    again = round_trip(layer)
    inputs, keep = detached(make_inputs(layer)), make_keep("holes")
    expected = layer(*inputs, key_padding_mask=~keep)
    torch.testing.assert_close(again(*inputs, key_padding_mask=~keep), expected, rtol=0, atol=0)
    with torch.no_grad():  # nothing is shared with the original
        for parameter in again.parameters():
            parameter.zero_()
    torch.testing.assert_close(layer(*inputs, key_padding_mask=~keep), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_dtype_reaches_everything(method, dtype):
    layer = make_layer(method, add_bias_kv=True).to(dtype)
    assert {x.dtype for x in layer.state_dict().values()} == {dtype}
    inputs = tuple(x.to(dtype) for x in make_inputs(layer))
    for need_weights in (False, True):
        output, weights = layer(*inputs, key_padding_mask=~make_keep("holes"), need_weights=need_weights)
        assert output.dtype == dtype
        assert weights is None or weights.dtype == dtype
        assert output.isfinite().all()


@pytest.mark.parametrize("start", ["random", "segments"])
@pytest.mark.parametrize("method", METHODS)
def test_meta_device_then_real(method, start):
    def build(device):
        return LinearMultiheadAttention(
            E, 2, add_bias_kv=True, seq_len=MAX_LEN, proj_k=K, method=method, start=start, device=device
        )

    layer = build("meta")
    assert all(x.is_meta for x in layer.state_dict().values())
    x = torch.empty(MAX_LEN, 2, E, device="meta")
    assert layer(x, x, x)[0].shape == x.shape
    with torch.device("meta"):
        assert all(x.is_meta for x in build(None).state_dict().values())
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    real = build("cpu")
    torch.manual_seed(5)
    real.reset_parameters()
    for name, value in real.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name


def test_buffer_of_fixed_projections_is_saved():
    layer = make_layer("no_params")
    assert "projection.weight" in layer.state_dict()
    assert "projection.weight" not in dict(layer.named_parameters())


# Compiling


def with_gradients(run, layer, inputs, keep, **options):
    return outputs_and_gradients(
        lambda: run(*inputs, key_padding_mask=ignore(keep), **options), named(*inputs), dict(layer.named_parameters())
    )


@pytest.mark.parametrize(
    ("method", "sharing", "mask"),
    [
        ("learnable", "none", "holes"),
        ("convolution", "kv", "none"),  # the others with a mask of numbers below
        *(
            pytest.param(method, "none", "holes", marks=pytest.mark.thorough)
            for method in GRAPHS
            if method != "learnable"
        ),
        pytest.param("learnable", "kv", "none", marks=pytest.mark.thorough),
    ],
)
def test_compiled_without_a_graph_break_is_the_same(method, sharing, mask):
    torch._dynamo.reset()
    layer = make_layer(method, sharing)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for length in (11, 7):  # the second compiles for all lengths
        inputs, keep = make_inputs(layer, s=length), make_keep(mask, s=length)
        assert_close(*(with_gradients(run, layer, inputs, keep) for run in (compiled, layer)))


@pytest.mark.parametrize("method", GRAPHS)
def test_compiled_with_a_float_mask_and_torchs_options(method):
    torch._dynamo.reset()
    layer = make_layer(method, "headwise", add_bias_kv=True, add_zero_attn=True, kdim=5, vdim=7)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    inputs, keep = detached(make_inputs(layer)), make_keep("empty row")
    mask = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(
        compiled(*inputs, key_padding_mask=mask, need_weights=False),
        layer(*inputs, key_padding_mask=~keep, need_weights=False),
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_compiled_to_machine_code_is_the_same():
    torch._dynamo.reset()
    layer = make_layer("learnable", "kv", dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    inputs, keep = make_inputs(layer), make_keep("empty row")
    found = [with_gradients(run, layer, inputs, keep, need_weights=False) for run in (compiled, layer)]
    assert_close(*found, rtol=1e-4, atol=1e-5)


# Exporting


class SelfAttention(nn.Module):
    """One input with a dynamic length, and a mask."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, mask):
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]


class Unmasked(SelfAttention):
    def forward(self, x):
        return self.attention(x, x, x, need_weights=True)


def example(length, b=2):
    x = torch.randn(b, length, E)
    keep = torch.rand(b, length) < 0.6
    keep[0] = True
    return x, ~keep


@pytest.mark.parametrize(
    ("method", "sharing", "max_len"),  # k = 7 divides one of them
    [
        ("learnable", "none", 13),
        ("convolution", "kv", 13),
        ("mean", "none", 14),
        pytest.param("learnable", "kv", 14, marks=pytest.mark.thorough),
        pytest.param("convolution", "none", 14, marks=pytest.mark.thorough),
        pytest.param("max", "none", 13, marks=pytest.mark.thorough),
        pytest.param("mean", "none", 13, marks=pytest.mark.thorough),
        pytest.param("max", "none", 14, marks=pytest.mark.thorough),
    ],
)
def test_export_has_a_dynamic_length(method, sharing, max_len):
    layer = make_layer(method, sharing, dtype=torch.float32, seq_len=max_len).eval()
    length, batch = Dim("length", min=2, max=max_len), Dim("batch", min=2, max=64)
    masked = SelfAttention(layer)
    program = torch.export.export(masked, example(5), dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
    plain = torch.export.export(Unmasked(layer), example(5)[:1], dynamic_shapes=({0: batch, 1: length},))
    for n in (2, 3, 7, 11, max_len):
        x, mask = example(n, b=3)
        torch.testing.assert_close(program.module()(x, mask), masked(x, mask))
        torch.testing.assert_close(plain.module()(x), layer(x, x, x))


def test_exported_graph_refuses_a_longer_input():
    layer = make_layer(dtype=torch.float32)
    length = Dim("length", min=2, max=MAX_LEN)
    program = torch.export.export(Unmasked(layer), example(5)[:1], dynamic_shapes=({1: length},))
    with pytest.raises(AssertionError, match=r"Guard failed|<= 13"):
        program.module()(torch.randn(2, MAX_LEN + 1, E))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")  # torch's own, while it exports
@pytest.mark.filterwarnings(
    "ignore:# The axis name. .* will not be used:UserWarning"
)  # both inputs have the same length
@pytest.mark.parametrize(
    ("method", "sharing"),
    [
        ("learnable", "none"),
        pytest.param("convolution", "none", marks=pytest.mark.thorough),
        pytest.param("max", "none", marks=pytest.mark.thorough),
        pytest.param("mean", "none", marks=pytest.mark.thorough),
        pytest.param("learnable", "kv", marks=pytest.mark.thorough),
    ],
)
def test_onnx_gives_the_same(tmp_path, method, sharing):
    layer = SelfAttention(make_layer(method, sharing, dtype=torch.float32)).eval()
    length, batch = Dim("length", min=2, max=MAX_LEN), Dim("batch", min=2, max=64)
    program = torch.onnx.export(
        layer, example(5), dynamo=True, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}), verbose=False
    )
    program.save(tmp_path / "layer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    for n in (2, 5, 11, MAX_LEN):
        x, mask = example(n, b=3)
        (output,) = session.run(None, dict(zip(names, (x.numpy(), mask.numpy()), strict=True)))
        torch.testing.assert_close(torch.from_numpy(output), layer(x, mask), rtol=1e-4, atol=1e-5)
