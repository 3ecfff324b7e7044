"""Defects of another package, shown on its models, each with a test that ours do not have it.

The peer is ``linformer_pytorch`` 0.19.3; its models are those that the seq2seq experiments inherit from.
"""

import copy
import io

import linformer_pytorch as peer
import pytest
import torch
from model_cases import CAUSAL, ENCODERS, N, holes, inputs, make_causal_lm, make_encdec, make_stack, source_ids, tokens
from torch import nn

from linformers import Linformer, LinformerEncDec, LinformerLM
from linformers.projections.base import Projection

SIZES = {"input_size": 16, "channels": 8, "dim_k": 4, "nhead": 2, "depth": 2}


def changed_outputs(model, ids, position):
    """At which positions the output changes with the token at ``position``."""
    other = ids.clone()
    other[:, position] = (ids[:, position] + 1) % 7
    with torch.no_grad():
        return (model(ids) - model(other)).abs().amax(-1)[0] > 0


def test_a_causal_model_does_not_leak():
    ids = torch.randint(7, (1, 16))
    leaking = peer.LinformerLM(num_tokens=7, causal=True, **SIZES).eval()
    assert changed_outputs(leaking, ids, 15)[:15].any()
    causal = LinformerLM(num_tokens=7, causal=True, block_size=4, **SIZES).eval()
    assert changed_outputs(causal, ids, 15).tolist() == 15 * [False] + [True]


def test_the_decoder_is_causal():
    sizes = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in SIZES.items()}
    src, ids = torch.randint(7, (1, 16)), torch.randint(7, (1, 16))
    leaking = peer.LinformerEncDec(enc_num_tokens=7, dec_num_tokens=7, **sizes).eval()
    assert changed_outputs(lambda tgt: leaking(src, tgt), ids, 15)[:15].any()
    causal = LinformerEncDec(num_tokens=7, block_size=4, **SIZES).eval()
    for position in range(16):
        changes = changed_outputs(lambda tgt: causal(src, tgt), ids, position)
        assert not changes[:position].any()
        assert changes[position]


def test_cross_attention_sees_the_whole_source_at_every_step():
    """The peer puts the causal mask on cross-attention, so that the first target token sees one slot of the source only."""
    causal = LinformerEncDec(num_tokens=7, block_size=4, local_kernel=0, **SIZES).eval()
    tgt = torch.randint(7, (1, 16))
    for position in range(16):
        src = torch.randint(7, (1, 16))
        assert changed_outputs(lambda ids: causal(ids, tgt), src, position).all()
    heads = [m for m in peer.Linformer(decoder_mode=True, causal=True, **SIZES).modules() if hasattr(m, "causal_mask")]
    masks = [head.causal_mask for head in heads if isinstance(head, peer.LinearAttentionHead)]
    assert any(mask is not None and mask[0].tolist() == [True, False, False, False] for mask in masks)
    assert any(mask is None for mask in masks)  # and none where it belongs, on self-attention


def test_each_mask_is_used_on_its_own_side():
    model = make_encdec().eval()
    src, tgt = source_ids(2, 13), tokens(2, 12)
    src_mask, tgt_mask = holes(2, 13), holes(2, 12)
    expected = model(src, tgt, src_mask, tgt_mask)
    swapped = model(src[:, :12], tgt, tgt_mask, src_mask[:, :12])
    assert not torch.allclose(expected[tgt_mask & src_mask[:, :12]], swapped[tgt_mask & src_mask[:, :12]])


def test_source_and_target_may_have_different_lengths():
    sizes = {"enc_num_tokens": 7, "enc_channels": 8, "dec_num_tokens": 7, "dec_channels": 8}
    more = {"enc_input_size": 16, "dec_input_size": 12, "enc_dim_k": 4, "dec_dim_k": 4}
    src, tgt = torch.randint(7, (1, 16)), torch.randint(7, (1, 12))
    with pytest.raises(AssertionError, match="Embeddings size must be the same"):
        peer.LinformerEncDec(**sizes, **more)(src, tgt)
    assert LinformerEncDec(**sizes, **more, block_size=3)(src, tgt).shape == (1, 12, 7)
    wider = LinformerEncDec(**(sizes | {"enc_channels": 20}), **more, block_size=3)
    assert wider(src[:, :5], tgt[:, :3]).shape == (1, 3, 7)


def test_padding_does_not_leak():
    x = torch.randn(1, 11, 8)
    other = torch.cat([x, torch.randn(1, 5, 8)], 1)
    net = peer.Linformer(**SIZES).eval()
    with torch.no_grad():
        padded = peer.Padder(net)(x)
        # Its padding is not masked: another filler gives another result.
        assert not torch.allclose(net(other)[:, :11], padded, atol=1e-3)
    model, mask = Linformer(**SIZES).eval(), (torch.arange(16) < 11)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(other, mask)[:, :11], model(x))


def test_shorter_inputs_need_no_padding():
    with pytest.raises(AssertionError, match="has to match the `input_size`"):
        peer.Linformer(**SIZES)(torch.randn(1, 11, 8))
    assert Linformer(**SIZES)(torch.randn(1, 11, 8)).shape == (1, 11, 8)


def reloaded(make):
    """A model, and another one that has loaded its weights from a file."""
    model, file = make(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = make()
    again.load_state_dict(torch.load(file, weights_only=True))
    return model.eval(), again.eval()


@torch.no_grad()
def test_fixed_projections_are_saved():
    x = torch.randn(1, 16, 8)
    model, again = reloaded(lambda: peer.Linformer(method="no_params", **SIZES))
    assert not torch.allclose(model(x), again(x), atol=1e-3)
    model, again = reloaded(lambda: Linformer(method="no_params", **SIZES))
    assert torch.equal(model(x), again(x))


@torch.no_grad()
def test_fixed_projections_move_with_the_model():
    x = torch.randn(1, 16, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16"):
        peer.Linformer(method="no_params", **SIZES).to(torch.bfloat16)(x)
    model = Linformer(method="no_params", **SIZES).to(torch.bfloat16)
    assert model(x).dtype == model.projection.weight.dtype == torch.bfloat16


def test_k_falls_with_depth_under_layerwise_sharing():
    x = torch.randn(1, 16, 8)
    ignoring = peer.Linformer(k_reduce_by_layer=2, parameter_sharing="layerwise", **SIZES)
    ignoring(x, visualize=True)
    heads = [m for m in ignoring.modules() if isinstance(m, peer.LinearAttentionHead)]
    assert {head.P_bar.shape[-1] for head in heads} == {4}
    _, weights = Linformer(k_reduce_by_layer=2, parameter_sharing="layerwise", **SIZES)(x, need_weights=True)
    assert [w.shape[-1] for w in weights] == [4, 2]


@pytest.mark.parametrize("k", [61, 300])
def test_a_convolution_gives_the_k_that_was_asked_for(k):
    sizes = {"input_size": 512, "channels": 4, "dim_k": k, "nhead": 1, "method": "convolution"}
    x = torch.randn(1, 512, 4)
    net = peer.Linformer(**sizes)
    net(x, visualize=True)
    (head,) = (m for m in net.modules() if isinstance(m, peer.LinearAttentionHead))
    assert head.P_bar.shape[-1] != k
    _, (weights,) = Linformer(**sizes).eval()(x, need_weights=True)
    assert weights.shape[-1] == k
    assert (weights > 0).all()


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("level", ["C1", "C2"])
def test_checkpointing_takes_masks_and_inputs_without_gradient(level):
    x, mask = torch.randn(1, 16, 8), torch.ones(1, 16, dtype=torch.bool)
    net = peer.Linformer(checkpoint_level=level, **SIZES)
    with pytest.raises(AssertionError, match="Cannot run checkpointing when using kwargs"):
        net(x, input_mask=mask)
    model = Linformer(checkpoint_level=level, **SIZES)
    model(x, mask).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:None of the inputs have requires_grad:UserWarning")
def test_the_checkpointed_peer_fails_without_a_gradient_of_the_input():
    net = peer.Linformer(checkpoint_level="C1", **SIZES)
    with pytest.raises(RuntimeError, match="does not require grad"):
        net(torch.randn(1, 16, 8)).sum().backward()


def test_a_shared_projection_is_stored_once():
    sizes = {"input_size": 16, "channels": 12, "dim_k": 4, "nhead": 12, "depth": 12, "parameter_sharing": "layerwise"}
    entries = [name for name in peer.Linformer(**sizes).state_dict() if name.endswith(("E.weight", "F.weight"))]
    assert len(entries) == 288
    model = Linformer(**sizes)
    assert [name for name in model.state_dict() if "projection" in name] == ["projection.weight"]
    assert sum(isinstance(m, Projection) for m in model.modules()) == 1


def test_a_parameter_is_used_in_one_place_only():
    """An unused or twice registered parameter is what makes data parallel training of the peer fail."""
    for options in (ENCODERS["plain"], ENCODERS["sharing none"], CAUSAL["plain"]):
        model = make_stack(options)
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert len(names) == len(list(model.parameters()))
        model(inputs(2, N)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    net = peer.Linformer(**SIZES)
    assert len(list(net.named_parameters(remove_duplicate=False))) > len(list(net.parameters()))


def test_masking_does_not_change_the_callers_tensors():
    """The peer masks in place."""
    model, x, mask = make_stack({}), inputs(2, N), holes(2, N)
    before = copy.deepcopy((x.detach(), mask))
    model(x, mask)
    assert torch.equal(x, before[0])
    assert torch.equal(mask, before[1])


def test_full_and_linear_attention_of_a_comparison_have_the_same_heads():
    """The experiments compared four heads of full attention with one of linear attention."""
    full, linear = (Linformer(attention=attention, **SIZES) for attention in ("full", "linformer"))
    for a, b in zip(full.layers, linear.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            assert getattr(a.attention, name).weight.shape == getattr(b.attention, name).weight.shape
    assert full.nhead == linear.nhead
    difference = sum(p.numel() for p in linear.parameters()) - sum(p.numel() for p in full.parameters())
    assert difference == 16 * 4  # the projection, and nothing else


def test_a_causal_model_cannot_copy_what_it_has_not_read():
    """A leaking model learns random tokens by looking ahead; its perplexity then means nothing."""

    def train(model):
        torch.manual_seed(0)
        optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(120):
            ids = torch.randint(7, (32, 17))
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    chance = torch.tensor(7.0).log().item()
    assert train(LinformerLM(num_tokens=7, causal=True, block_size=4, **SIZES)) > 0.98 * chance


def test_causal_generation_uses_only_the_past():
    """Padding after a prompt does not change its continuation."""
    model, prompt = make_causal_lm().eval(), tokens(1, 5)
    for _ in range(3):
        padded = torch.cat([prompt, tokens(1, 4)], 1)
        mask = (torch.arange(9) < 5)[None]
        assert torch.equal(model.generate(padded, 7, mask=mask)[:, 9:], model.generate(prompt, 7)[:, 5:])
