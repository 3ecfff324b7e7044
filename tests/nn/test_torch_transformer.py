"""Inside torch's own transformer layers: torch's fused path must not bypass the layer, nor its nested tensors break it."""

import copy

import pytest
import torch
from covering import covering
from torch import nn

from linformers import LinearMultiheadAttention

B, MAX_LEN, K, DEPTH = 3, 13, 5, 2
LENGTHS = torch.tensor([7, 11, 2])
# torch warns of nested tensors, also with its own attention
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


class Counting(LinearMultiheadAttention):
    """Counts its calls. (A hook would do, but torch turns its fused path off when it sees one.)"""

    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs)


def attention(heads, batch_first=True, method="learnable", **options):
    layer = Counting(
        2 * heads,
        heads,
        batch_first=batch_first,
        seq_len=MAX_LEN,
        proj_k=K,
        method=method,
        dtype=torch.float64,
        **options,
    )
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def torch_layer(heads, batch_first=True, kind=nn.TransformerEncoderLayer, **options):
    return kind(2 * heads, heads, 7, dropout=0.0, batch_first=batch_first, dtype=torch.float64, **options)


def built_with(heads, batch_first, method, **options):
    layer = torch_layer(heads, batch_first, **options)
    layer.self_attn = attention(heads, batch_first, method)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def swapped_in(heads, batch_first, method, **options):
    """As with a trained model: its encoder decided on nested tensors when it was built."""
    encoder = nn.TransformerEncoder(torch_layer(heads, batch_first, **options), DEPTH)
    for layer in encoder.layers:
        layer.self_attn = attention(heads, batch_first, method)
    return encoder


def by_hand(encoder, x):
    """One sequence ``(n, d)``, without torch's layers and without padding."""
    for layer in encoder.layers:
        if layer.norm_first:
            y = layer.norm1(x)
            x = x + layer.self_attn(y, y, y)[0]
            x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
        else:
            x = layer.norm1(x + layer.self_attn(x, x, x)[0])
            x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return x


def count(encoder):
    return [layer.self_attn.calls for layer in encoder.layers]


@pytest.mark.parametrize(
    **covering(
        masked=[False, True],
        grad=[False, True],
        training=[False, True],
        batch_first=[False, True],
        heads=[2, 3],
        build=[built_with, swapped_in],
        method=["learnable", "mean", "max", "convolution"],
    )
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")  # odd heads, or not batch first
def test_encoder_runs_this_attention(build, method, heads, batch_first, training, grad, masked):
    encoder = build(heads, batch_first, method).train(training)
    encoder.requires_grad_(grad)
    x = torch.randn(B, 11, 2 * heads, dtype=torch.float64, requires_grad=grad)
    mask = torch.arange(11) >= LENGTHS[:, None] if masked else None
    with torch.set_grad_enabled(grad):
        output = encoder(x if batch_first else x.transpose(0, 1), src_key_padding_mask=mask)
        output = output if batch_first else output.transpose(0, 1)
        assert count(encoder) == [1] * DEPTH
        for i, length in enumerate(LENGTHS.tolist()):
            length = length if masked else 11
            torch.testing.assert_close(output[i, :length], by_hand(encoder, x[i, :length]))
    if grad:
        output[0, : LENGTHS[0]].sum().backward()
        assert all(p.grad is not None for p in encoder.parameters())


@pytest.mark.parametrize(**covering(norm_first=[False, True], activation=["relu", "gelu"], training=[False, True]))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
def test_options_of_the_encoder_layer(training, activation, norm_first):
    for build in (built_with, swapped_in):
        encoder = build(2, True, "learnable", activation=activation, norm_first=norm_first).train(training)
        x = torch.randn(B, 11, 4, dtype=torch.float64)
        mask = torch.arange(11) >= LENGTHS[:, None]
        with torch.no_grad():
            output = encoder(x, src_key_padding_mask=mask)
            for i, length in enumerate(LENGTHS.tolist()):
                torch.testing.assert_close(output[i, :length], by_hand(encoder, x[i, :length]))


@pytest.mark.parametrize("kind", ["holes", "empty row", "float"])
@pytest.mark.parametrize("grad", [False, True])
def test_swapped_in_eval_equals_train_for_every_mask(kind, grad):
    encoder = swapped_in(2, True, "learnable")
    x = torch.randn(B, 11, 4, dtype=torch.float64)
    keep = torch.arange(11) < LENGTHS[:, None]
    if kind == "holes":
        keep[0, 3] = keep[1, 0] = False
    elif kind == "empty row":
        keep[2] = False
    mask = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf) if kind == "float" else ~keep
    expected = encoder.train()(x, src_key_padding_mask=mask)
    with torch.set_grad_enabled(grad):
        output = encoder.eval()(x, src_key_padding_mask=mask)
    assert output.isfinite().all()
    torch.testing.assert_close(output[keep], expected[keep])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("heads", [2, 3])
def test_single_encoder_layer_in_eval(heads, grad):
    layer = torch_layer(heads).eval()
    layer.self_attn = attention(heads)
    x = torch.randn(B, 11, 2 * heads, dtype=torch.float64)
    mask = torch.arange(11) >= LENGTHS[:, None]
    with torch.set_grad_enabled(grad):
        whole, padded = layer(x), layer(x, src_key_padding_mask=mask)
        assert layer.self_attn.calls == 2
        for i, length in enumerate(LENGTHS.tolist()):
            torch.testing.assert_close(padded[i, :length], layer(x[i : i + 1, :length])[0])
    torch.testing.assert_close(whole, layer.train()(x))


def test_torch_really_would_bypass_a_look_alike():
    """The layer is protected from this: with this flag torch runs full attention on its weights."""
    layer = torch_layer(2).eval()
    layer.self_attn = attention(2)
    x = torch.randn(B, 11, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)
        layer.self_attn._qkv_same_embed_dim = True
        layer.self_attn.merge_masks = lambda *_: (None, None)
        layer.self_attn.calls = 0
        bypassed = layer(x)
    assert layer.self_attn.calls == 0
    assert (bypassed - expected).abs().max() > 0.1


def test_encoder_built_with_it_says_that_nested_tensors_are_off():
    layer = torch_layer(2)
    layer.self_attn = attention(2)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but self.use_nested_tensor is False"):
        nn.TransformerEncoder(layer, DEPTH)


def decoder_by_hand(layer, x, memory):
    x = layer.norm1(x + layer.self_attn(x, x, x)[0])
    x = layer.norm2(x + layer.multihead_attn(x, memory, memory)[0])
    return layer.norm3(x + layer.linear2(layer.activation(layer.linear1(x))))


@pytest.mark.parametrize(**covering(training=[False, True], batch_first=[False, True], heads=[2, 3]))
def test_decoder_layer_runs_this_attention(heads, batch_first, training):
    layer = torch_layer(heads, batch_first, nn.TransformerDecoderLayer).train(training)
    layer.self_attn, layer.multihead_attn = attention(heads, batch_first), attention(heads, batch_first)
    x, memory = (torch.randn(B, n, 2 * heads, dtype=torch.float64) for n in (11, 13))
    lengths, memory_lengths = LENGTHS, torch.tensor([13, 3, 5])
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    output = turn(
        layer(
            turn(x),
            turn(memory),
            tgt_key_padding_mask=torch.arange(11) >= lengths[:, None],
            memory_key_padding_mask=torch.arange(13) >= memory_lengths[:, None],
        )
    )
    assert (layer.self_attn.calls, layer.multihead_attn.calls) == (1, 1)
    for i in range(B):
        expected = decoder_by_hand(layer, x[i, : lengths[i]], memory[i, : memory_lengths[i]])
        torch.testing.assert_close(output[i, : lengths[i]], expected)


def test_decoder_layer_refuses_a_causal_mask():
    """Rather than leak: a dense projection cannot be causal."""
    layer = torch_layer(2, kind=nn.TransformerDecoderLayer)
    layer.self_attn = attention(2)
    x = torch.randn(B, 11, 4, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(11, dtype=torch.float64)
    with pytest.raises(ValueError, match="has no meaning"):
        layer(x, x, tgt_mask=mask)


@pytest.mark.parametrize("training", [False, True])
def test_whole_transformer(training):
    """``nn.Transformer`` with every attention swapped; padding of both sides equals trimming."""
    model = nn.Transformer(4, 2, DEPTH, DEPTH, 7, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    swapped = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                linear = attention(2)
                assert linear.load_state_dict(child.state_dict(), strict=False).unexpected_keys == []
                setattr(module, name, linear)
                swapped.append(linear)
    assert len(swapped) == 3 * DEPTH
    source, target = torch.randn(B, 13, 4, dtype=torch.float64), torch.randn(B, 11, 4, dtype=torch.float64)
    source_mask, target_mask = (torch.arange(n) >= LENGTHS[:, None] for n in (13, 11))
    with torch.no_grad():
        output = model(
            source,
            target,
            src_key_padding_mask=source_mask,
            tgt_key_padding_mask=target_mask,
            memory_key_padding_mask=source_mask,
        )
        assert all(layer.calls == 1 for layer in swapped)
        for i, length in enumerate(LENGTHS.tolist()):
            alone = model(source[i : i + 1, :length], target[i : i + 1, :length])[0]
            torch.testing.assert_close(output[i, :length], alone)


def test_copies_that_the_encoder_makes_are_independent():
    encoder = built_with(2, True, "learnable")
    weights = [layer.self_attn.projection.weight for layer in encoder.layers]
    assert weights[0] is not weights[1]
    x = torch.randn(B, 11, 4, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(encoder)(x), encoder(x))
