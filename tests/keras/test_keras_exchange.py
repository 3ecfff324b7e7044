"""The same weights in PyTorch and Keras give the same numbers, on every backend (law 8)."""

import numpy as np
import pytest
import torch
from comparison import PROJECTIONS
from keras_comparison import SHARINGS, H, K, N, close, gradient, make_inputs, make_layer, trailing

from linformers import LinearMultiheadAttention
from linformers.keras import LinearMultiHeadAttention, from_torch, to_torch


def make_torch(**options):
    options = {"kdim": 5, "vdim": 7, "seq_len": N, "proj_k": K} | options
    layer = LinearMultiheadAttention(6, H, **options).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def run_torch(layer, query, value, key, mask=None):
    mask = None if mask is None else torch.tensor(~mask)
    batch_first = layer.batch_first
    query, key, value = (
        torch.tensor(x) if batch_first else torch.tensor(x).transpose(0, 1) for x in (query, key, value)
    )
    with torch.no_grad():
        output, weights = layer(query, key, value, key_padding_mask=mask, average_attn_weights=False)
    return output.numpy() if batch_first else output.transpose(0, 1).numpy(), weights.numpy()


@pytest.mark.parametrize(("method", "sharing"), PROJECTIONS)
def test_from_torch_and_back(method, sharing):
    original = make_torch(method=method, param_sharing=sharing)
    layer = from_torch(original, name="converted")
    assert layer.name == "converted"
    back = to_torch(layer)
    assert back.state_dict().keys() == original.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name]), name
    inputs = make_inputs()
    for mask in (None, trailing(lengths=(11, 6, 0))):
        expected, weights = run_torch(original, *inputs, mask)
        output, scores = layer(*inputs, value_mask=mask, return_attention_scores=True)
        close(output, expected)
        close(scores, weights)
        close(run_torch(back, *inputs, mask)[0], expected, 1e-6)


@pytest.mark.parametrize("method", ["learnable", "max"])
def test_gradients_agree(method):
    original = make_torch(method=method, batch_first=True)
    layer = from_torch(original)
    query, value, key = make_inputs()
    mask = trailing()
    tensors = [torch.tensor(x, requires_grad=True) for x in (query, value, key)]
    output, _ = original(tensors[0], tensors[2], tensors[1], key_padding_mask=torch.tensor(~mask))
    expected = torch.autograd.grad(output.square().sum(), tensors)
    for actual, other in zip(
        gradient(lambda *xs: layer(*xs, value_mask=mask), query, value, key), expected, strict=True
    ):
        close(actual, other.numpy(), 1e-4)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_content_slots_of_any_length(sharing):
    original = make_torch(method="content", param_sharing=sharing, seq_len=None)
    layer = from_torch(original)
    assert (layer.method, layer.max_length) == ("content", None)
    assert layer.sharing == ("none" if sharing == "none" else "kv")  # keys and values always share the choice
    back = to_torch(layer)
    assert back.seq_len is None
    inputs = make_inputs(s=31)
    expected = run_torch(original, *inputs)[0]
    close(layer(*inputs), expected)
    close(run_torch(back, *inputs)[0], expected, 1e-6)


def test_packed_weights_no_bias_half_precision_and_user_defined_matrices():
    query = make_inputs()[0]
    packed = make_torch(kdim=None, vdim=None, bias=False, batch_first=True)
    close(from_torch(packed)(query, query), run_torch(packed, query, query, query)[0])
    half = from_torch(make_torch(dtype=torch.bfloat16))
    assert np.isfinite(half.get_weights()[0]).all()
    for matrix, method in ((torch.randn(N, K), "no_params"), (torch.nn.Parameter(torch.randn(N, K)), "learnable")):
        given = LinearMultiheadAttention(6, H, seq_len=N, proj_k=K, method=matrix, batch_first=True).eval()
        layer = from_torch(given)
        assert (layer.method, layer.sharing) == (method, "kv")
        close(layer(query, query), run_torch(given, query, query, query)[0])


def test_what_only_one_of_them_has_is_refused():
    with pytest.raises(ValueError, match="the Keras layer has no add_bias_kv"):
        from_torch(make_torch(add_bias_kv=True))
    with pytest.raises(ValueError, match="the Keras layer has no add_zero_attn"):
        from_torch(make_torch(add_zero_attn=True))
    with pytest.raises(ValueError, match="the Keras layer has no num_kv_heads"):
        from_torch(make_torch(num_kv_heads=1))
    with pytest.raises(ValueError, match="the Keras layer has no open_slots; convert a layer that was built without"):
        from_torch(make_torch(method="mean", open_slots=2))
    with pytest.raises(ValueError, match="the Keras layer has no local_window"):
        from_torch(make_torch(method="content", seq_len=None, local_window=3))
    with pytest.raises(ValueError, match="no projection like Custom"):
        from_torch(make_torch(method=torch.nn.Identity()))
    with pytest.raises(ValueError, match=r"has 2 matrices for keys and values together.*or 4"):
        from_torch(make_torch(method=torch.randn(H, N, K)))
    with pytest.raises(ValueError, match="'unbuilt' is not built; pass one with projection_dim, after its first call"):
        to_torch(LinearMultiHeadAttention(H, 3, projection_dim=K, name="unbuilt"))
    with pytest.raises(ValueError, match="has no projection"):
        to_torch(make_layer(projection_dim=None))
    with pytest.raises(ValueError, match=r"got 2 \* 3, 2 \* 5, 6 and \(6,\), use_gate=False"):
        to_torch(make_layer(value_dim=5))
    assert to_torch(make_layer()).seq_len == N
