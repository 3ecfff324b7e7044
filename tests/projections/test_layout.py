"""Projections in rows: at the right scale after the initialisation loops of other packages' models; and files of the earlier layout load."""

import copy

import pytest
import torch
from comparison import SHARINGS, make_inputs, make_layer
from covering import covering
from old_layout import old_state, stacked
from torch import nn

from linformers import LinearMultiheadAttention, Linformer, make_projection
from linformers.projections.layout import moments_to_rows, to_rows, to_stacked

STORED = ("learnable", "no_params", "convolution")


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("method", ["learnable", "convolution"])
def test_the_usual_xavier_loop_keeps_the_scale(method, sharing):
    squares, wanted = [], None
    for _ in range(64 if method == "convolution" else 1):  # a kernel has few numbers
        layer = LinearMultiheadAttention(16, 8, seq_len=512, proj_k=128, param_sharing=sharing, method=method)
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        stored = getattr(layer.projection, layer.projection.stored)
        squares.append(stored.detach().square().mean())
        wanted = len(stored) ** -0.5  # 1 / sqrt(max_len), or 1 / sqrt(width)
    assert 0.5 < torch.stack(squares).mean().sqrt() / wanted < 2


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_transformer_of_torch_starts_it_at_the_right_scale(sharing):
    """Built with it, by the loop in its constructor."""

    def attention():
        return LinearMultiheadAttention(16, 8, seq_len=512, proj_k=128, param_sharing=sharing)

    layer = nn.TransformerEncoderLayer(16, 8, 17)
    layer.self_attn = attention()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Transformer(16, 8, 1, 1, 17, custom_encoder=encoder)
    for each in model.encoder.layers:
        for part in range(each.self_attn.projection.parts):
            assert 0.5 < each.self_attn.projection.matrix(part).std() * 512**0.5 < 2


@pytest.mark.parametrize("shape", [(2, 3, 13, 7), (2, 1, 13, 7), (1, 1, 13, 7), (2, 3, 13), (1, 3, 13), (1, 1, 13)])
def test_rows_and_stacks_are_the_same_numbers(shape):
    old = torch.randn(shape)
    rows = to_rows(old)
    parts, heads, n, *k = shape
    k = k[0] if k else 1
    assert rows.shape == (n, parts * heads * k)
    assert rows.is_contiguous()
    for p in range(parts):
        for h in range(heads):
            for j in range(k):
                column = old[p, h, :, j] if old.dim() == 4 else old[p, h]
                assert torch.equal(rows[:, (p * heads + h) * k + j], column)
    assert torch.equal(to_stacked(rows, parts, heads).reshape(shape), old)
    assert to_rows(rows) is rows


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("method", STORED)
def test_the_matrices_are_views(method, sharing):
    projection = make_projection(13, 7, heads=3, sharing=sharing, method=method)
    stored = getattr(projection, projection.stored)
    for part in range(projection.parts):
        found = projection.taps(part, 7) if method == "convolution" else projection.matrix(part)
        assert found.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    if method != "convolution" and projection.count == 1:
        assert found.is_contiguous()


@pytest.mark.parametrize(**covering(sharing=SHARINGS, method=STORED, options=[{}, {"strict": False}, {"assign": True}]))
def test_state_dicts_of_the_old_layout_load(method, sharing, options):
    layer, other = make_layer(method, sharing), make_layer(method, sharing)
    old = old_state(layer)
    given = dict(old)
    missing, unexpected = other.load_state_dict(old, **options)
    assert (missing, unexpected) == ([], [])
    assert old.keys() == given.keys()
    assert all(old[name] is given[name] for name in old)  # the caller's dictionary is as it was
    inputs = make_inputs(layer)
    torch.testing.assert_close(other(*inputs)[0], layer(*inputs)[0], rtol=0, atol=0)
    assert [(name, p.shape, p.requires_grad) for name, p in other.named_parameters()] == [
        (name, p.shape, p.requires_grad) for name, p in layer.named_parameters()
    ]
    other.zero_grad()
    other(*inputs)[0].sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in other.parameters())


def test_a_projection_alone_and_inside_other_models_loads():
    for sharing in SHARINGS:
        projection = make_projection(13, 7, heads=3, sharing=sharing)
        other = make_projection(13, 7, heads=3, sharing=sharing)
        other.load_state_dict({"weight": stacked(projection.weight.detach(), projection)})
        assert torch.equal(other.weight, projection.weight)
        stack = Linformer(13, 6, 5, nhead=2, depth=2, parameter_sharing=sharing, method="convolution").eval()
        again = copy.deepcopy(stack)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        again.load_state_dict(old_state(stack))
        x = torch.randn(2, 11, 6)
        torch.testing.assert_close(again(x), stack(x), rtol=0, atol=0)


def test_old_weights_of_another_size_are_an_error():
    projection = make_projection(13, 7, heads=3, sharing="none")
    with pytest.raises(
        RuntimeError, match=r"shape torch.Size\(\[13, 28\]\).*current model is torch.Size\(\[13, 42\]\)"
    ):
        projection.load_state_dict({"weight": torch.randn(2, 2, 13, 7)})


@pytest.mark.parametrize(
    **covering(sharing=SHARINGS, method=["learnable", "convolution"], kind=[torch.optim.AdamW, torch.optim.SGD])
)
def test_the_moments_of_an_old_optimiser_go_on(kind, method, sharing):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    layer = make_layer(method, sharing)
    inputs = make_inputs(layer)

    def step(layer, optimizer):
        optimizer.zero_grad()
        layer(*inputs)[0].square().sum().backward()
        optimizer.step()

    first = kind(layer.parameters(), lr=0.01, **options)
    for _ in range(3):
        step(layer, first)
    resumed = copy.deepcopy(layer)
    state = first.state_dict()
    projection, names = layer.projection, [name for name, _ in layer.named_parameters()]
    index = names.index(f"projection.{projection.stored}")
    old = copy.deepcopy(state)
    for name, x in old["state"][index].items():
        if torch.is_tensor(x) and x.dim() == 2:
            old["state"][index][name] = stacked(x, projection)
    second = kind(resumed.parameters(), lr=0.01, **options)
    second.register_load_state_dict_pre_hook(moments_to_rows)
    before = copy.deepcopy(old)
    second.load_state_dict(old)
    torch.testing.assert_close(old["state"], before["state"])  # as it was given
    for each, optimizer in ((layer, first), (resumed, second)):
        step(each, optimizer)
    for a, b in zip(layer.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
