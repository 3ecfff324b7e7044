"""The encoder-decoder: each mask on its own side, a causal target, projections of its own, and options for either side."""

import inspect

import pytest
import torch
from comparison import SHARINGS, assert_close, outputs_and_gradients
from encdec_cases import VARIANTS
from model_cases import (
    CHANNELS,
    SOURCE,
    SOURCE_VOCABULARY,
    TARGET,
    VOCABULARY,
    by_name,
    changed,
    holes,
    make_encdec,
    tokens,
)
from model_cases import source_ids as source
from safetensors.torch import load_model, save_model

from linformers import LinformerEncDec
from linformers.models import stack
from linformers.models.reversible import run_reversible
from linformers.projections.base import Projection


def run(model, src, tgt, src_mask=None, tgt_mask=None):
    real = 1.0 if tgt_mask is None else tgt_mask[..., None].double()
    forward = model if isinstance(model, LinformerEncDec) else model.forward
    return outputs_and_gradients(
        lambda: [real * forward(src, tgt, src_mask, tgt_mask)], {}, dict(model.named_parameters())
    )


# Law 2: each mask where it belongs


@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_padding_of_either_side_equals_trimming(options):
    model, src, tgt = make_encdec(**options), source(2, SOURCE), tokens(2, TARGET)
    parameters = dict(model.named_parameters())
    for s, t in ((4, 10), (SOURCE, 1), (1, TARGET)):
        src_mask, tgt_mask = ((torch.arange(n) < used).expand(2, -1) for n, used in ((SOURCE, s), (TARGET, t)))
        padded = outputs_and_gradients(
            lambda a=src_mask, b=tgt_mask, t=t: [model(src, tgt, a, b)[:, :t]], {}, parameters
        )
        trimmed = outputs_and_gradients(lambda s=s, t=t: [model(src[:, :s], tgt[:, :t])], {}, parameters)
        assert_close(padded, trimmed)


@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_masked_tokens_have_no_influence(options):
    model, src, tgt = make_encdec(**options), source(3, SOURCE), tokens(3, TARGET)
    src_mask, tgt_mask = holes(3, SOURCE), holes(3, TARGET)
    src_mask[2] = False  # a source of nothing
    expected = run(model, src, tgt, src_mask, tgt_mask)
    other = changed(src, src_mask, SOURCE_VOCABULARY), changed(tgt, tgt_mask)
    assert_close(run(model, *other, src_mask, tgt_mask), expected, rtol=0, atol=0)
    assert all(x.isfinite().all() for x in expected.values())


def test_real_tokens_of_both_sides_have_influence():
    model, src, tgt = make_encdec().eval(), source(1, SOURCE), tokens(1, TARGET)
    expected = model(src, tgt)
    for i in range(SOURCE):
        other = src.clone()
        other[0, i] = (src[0, i] + 1) % SOURCE_VOCABULARY
        assert not torch.allclose(model(other, tgt)[0, 0], expected[0, 0])
    other = tgt.clone()
    other[0, 0] = (tgt[0, 0] + 1) % VOCABULARY
    assert not torch.allclose(model(src, other)[0, -1], expected[0, -1])


def test_left_padding_of_the_target_is_exact():
    model, src, tgt = make_encdec(), source(2, SOURCE), tokens(2, 7)
    padded = torch.cat([tokens(2, 4), tgt], 1)
    mask = (torch.arange(11) >= 4).expand(2, -1)
    torch.testing.assert_close(model(src, padded, tgt_mask=mask)[:, 4:], model(src, tgt), rtol=1e-10, atol=1e-10)


# Law 4: causality


@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_no_output_depends_on_a_later_target(options):
    model, src, tgt = make_encdec(**options).eval(), source(1, SOURCE), tokens(1, TARGET)
    with torch.no_grad():
        expected = model(src, tgt)
        for t in range(TARGET):
            other = tgt.clone()
            other[:, t] = (tgt[:, t] + 1) % VOCABULARY
            found = model(src, other)
            assert torch.equal(found[:, :t], expected[:, :t])
            assert not torch.allclose(found[:, t], expected[:, t])


@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_decoding_from_every_prompt_equals_the_parallel_pass(options):
    model, src, tgt = make_encdec(**options).eval(), source(2, SOURCE), tokens(2, TARGET)
    mask = holes(2, SOURCE)
    with torch.no_grad():
        expected, memory = model(src, tgt, mask), model.encode(src, mask)
        for prompt in (1, 5, 6, 7, TARGET - 1):
            state = model.decoder.new_state(2)
            model.decoder(tgt[:, :prompt], memory=memory, state=state)
            found = torch.stack([model.decoder.step(tgt[:, t], state) for t in range(prompt, TARGET)], 1)
            torch.testing.assert_close(found, expected[:, prompt:], rtol=1e-10, atol=1e-10)


# Law 5: sharing


@pytest.mark.parametrize(("sharing", "per_layer"), list(zip(SHARINGS, (4, 2, 1, None), strict=True)))
def test_each_side_has_its_own_projections(sharing, per_layer, tmp_path):
    """2 L h, 2 L, L and 1 in the encoder; twice that in the decoder, whose layers attend to target and source."""
    sizes = {"parameter_sharing": sharing, "enc_depth": 3, "dec_depth": 2}
    model = make_encdec(**sizes)

    def found(part):
        return sum(m.count for m in part.modules() if isinstance(m, Projection))

    assert found(model.encoder) == (1 if per_layer is None else 3 * per_layer)
    assert found(model.decoder) == (2 if per_layer is None else 2 * 2 * per_layer)
    save_model(model, tmp_path / "model.safetensors")
    again = make_encdec(**sizes)
    load_model(again, tmp_path / "model.safetensors")
    src, tgt = source(2, SOURCE), tokens(2, TARGET)
    assert torch.equal(again(src, tgt), model(src, tgt))


@pytest.mark.parametrize(
    ("attention", "cross_attention", "kind"),
    [
        ("linformer", "same", "linformer"),
        ("linformer", "full", "full"),
        ("full", "same", "full"),
        ("full", "linformer", "linformer"),
        ("none", "same", "full"),
        ("none", "linformer", "linformer"),
    ],
)
@pytest.mark.parametrize("sharing", ["layerwise", "kv"])
def test_the_source_is_seen_as_asked_for(attention, cross_attention, kind, sharing):
    """Every position of it once, in any order; or as many slots as there are."""
    model = make_encdec(attention=attention, cross_attention=cross_attention, parameter_sharing=sharing)
    stack, layer = model.decoder.body.linformer, model.decoder.body.linformer.layers[0]
    context, mask = torch.randn(2, SOURCE, stack.context_channels, dtype=torch.float64), holes(2, SOURCE)
    x = torch.randn(2, 5, CHANNELS, dtype=torch.float64)
    memory = stack.memory(context, mask)[0]
    assert memory.keys.shape[2] == (SOURCE if kind == "full" else layer.cross.slots)
    owned = sum(isinstance(m, Projection) for m in stack.modules())
    expected = {"layerwise": 1, "kv": stack.depth}[sharing]
    assert owned == ((attention == "linformer") + (kind == "linformer")) * expected
    out = layer.cross.look_up(x, memory)[0]
    order = torch.randperm(SOURCE)
    moved = layer.cross.look_up(x, stack.memory(context[:, order], mask[:, order])[0])[0]
    assert torch.allclose(moved, out) == (kind == "full")
    if kind == "full":
        heads = [t.unflatten(-1, (layer.cross.heads, -1)).transpose(1, 2) for t in (
            layer.cross.q_proj(x), layer.cross.k_proj(context), layer.cross.v_proj(context)
        )]  # fmt: skip
        seen = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None])
        torch.testing.assert_close(out, layer.cross.out_proj(seen.transpose(1, 2).flatten(2)))


def test_the_source_may_have_slots_of_its_own():
    model = make_encdec(context_k=7)
    stack = model.decoder.body.linformer
    assert stack.memory(torch.randn(1, SOURCE, stack.context_channels, dtype=torch.float64))[0].keys.shape[2] == 7
    assert stack.projection.k != 7
    assert make_encdec(context_k=SOURCE + 9).decoder.body.linformer.context_projection.k == SOURCE


# Names


def test_plain_names_mean_both_sides_and_prefixes_one():
    model = LinformerEncDec(
        num_tokens=17,
        input_size=24,
        channels=12,
        dim_d=3,
        dim_k=8,
        dim_ff=11,
        nhead=2,
        depth=2,
        emb_dim=6,
        parameter_sharing="none",
        dec_depth=3,
        enc_nhead=4,
        enc_input_size=13,
        enc_dim_k=5,
    )
    encoder, decoder = model.encoder.body, model.decoder.body
    for side in (encoder, decoder):
        assert side.token_emb.weight.shape == (17, 6)
        assert side.linformer.channels == 12
        assert side.linformer.head_dim == 3
        assert side.linformer.layers[0].ff.w_1.out_features == 11
    assert (encoder.input_size, decoder.input_size) == (13, 24)
    assert (encoder.linformer.depth, decoder.linformer.depth) == (2, 3)
    assert (encoder.linformer.nhead, decoder.linformer.nhead) == (4, 2)
    assert encoder.linformer.layers[0].attention.projection.weight.shape == (13, 2 * 4 * 5)
    assert decoder.linformer.layers[0].cross.projection.weight.shape == (13, 2 * 2 * 8)
    assert not encoder.linformer.causal
    assert decoder.linformer.causal
    assert model(source(2, 13) % 17, tokens(2, 24)).shape == (2, 24, 17)


def test_sizes_by_position():
    names = list(inspect.signature(LinformerEncDec).parameters)
    assert names[:6] == [
        f"{side}_{size}" for side in ("enc", "dec") for size in ("num_tokens", "input_size", "channels")
    ]
    model = LinformerEncDec(19, 13, 8, 17, 12, 4, dim_k=4)
    assert model(source(2, 13), tokens(2, 12)).shape == (2, 12, 17)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dim_kk", "unknown option 'dim_kk'"),
        ("enc_dim_kk", "unknown option 'enc_dim_kk'"),
        ("causal", "unknown option 'causal'"),
        ("dec_causal", "unknown option 'dec_causal'"),
        ("enc_block_size", "unknown option 'enc_block_size'"),
        ("dec_local_window", "unknown option 'dec_local_window'"),
        ("context_size", "unknown option 'context_size'"),
        ("enc_cross_attention", "unknown option 'enc_cross_attention'"),
        ("enc_context_k", "unknown option 'enc_context_k'"),
        ("enc_tie_weights", "unknown option 'enc_tie_weights'"),
        ("enc_enc_depth", "unknown option 'enc_enc_depth'"),
    ],
)
def test_a_mistyped_or_misplaced_option_is_an_error(name, message):
    with pytest.raises(TypeError, match=message):
        LinformerEncDec(num_tokens=7, input_size=8, channels=4, dim_k=2, **{name: 3})


@pytest.mark.parametrize("missing", ["num_tokens", "input_size", "channels"])
def test_a_missing_size_is_named(missing):
    sizes = {"num_tokens": 7, "input_size": 8, "channels": 4}
    value = sizes.pop(missing)
    with pytest.raises(TypeError, match=f"enc_{missing} is missing; give it, or {missing} for both"):
        LinformerEncDec(**sizes, dim_k=2)
    with pytest.raises(TypeError, match=f"dec_{missing} is missing"):
        LinformerEncDec(**sizes, dim_k=2, **{f"enc_{missing}": value})


def test_bad_input_is_an_error_of_its_own_side():
    model, src, tgt = make_encdec(), source(2, 5), tokens(2, 4)
    with pytest.raises(ValueError, match=f"sequence of {SOURCE + 1}, .* input_size={SOURCE}"):
        model(source(2, SOURCE + 1), tgt)
    with pytest.raises(ValueError, match=f"sequence of {TARGET + 1}, .* input_size={TARGET}"):
        model(src, tokens(2, TARGET + 1))
    with pytest.raises(ValueError, match=f"from 0 to {SOURCE_VOCABULARY - 1} .*, got {SOURCE_VOCABULARY}"):
        model(torch.full((2, 5), SOURCE_VOCABULARY), tgt)
    with pytest.raises(ValueError, match=f"from 0 to {VOCABULARY - 1} .*, got {VOCABULARY}"):
        model(src, torch.full((2, 4), VOCABULARY))
    with pytest.raises(ValueError, match=r"mask must be .* = \(2, 5\), got \(2, 4\)"):
        model(src, tgt, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be .* = \(2, 4\), got \(2, 5\)"):
        model(src, tgt, None, torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="empty"):
        model(source(2, 0), tgt)
    with pytest.raises(ValueError, match="empty"):
        model(src, tokens(2, 0))
    with pytest.raises(ValueError, match=r"batch of 2, but a memory for a batch of 3"):
        model(source(3, 5), tgt)
    assert model(source(0, 5), tokens(0, 4)).shape == (0, 4, VOCABULARY)


# Law 6: exporting; compiling and saving are tested with the other models


def test_exporting_with_dynamic_lengths_changes_nothing():
    model = make_encdec(depth=1).eval()
    s, t = torch.export.Dim("source", min=1, max=SOURCE), torch.export.Dim("target", min=1, max=TARGET)
    shapes = ({1: s}, {1: t})
    program = torch.export.export(model, (source(2, 11), tokens(2, 9)), dynamic_shapes=shapes).module()
    for given in ((source(2, 1), tokens(2, 1)), (source(2, 5), tokens(2, 7)), (source(2, SOURCE), tokens(2, TARGET))):
        torch.testing.assert_close(program(*given), model(*given))


def test_the_named_options_of_the_experiments_train_one_step():
    model = LinformerEncDec(
        num_tokens=23,
        input_size=256,
        channels=12,
        dim_d=5,
        dim_k=8,
        dim_ff=11,
        nhead=2,
        depth=2,
        emb_dim=7,
        parameter_sharing="layerwise",
    )
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    src, tgt = torch.randint(23, (3, 256)), torch.randint(23, (3, 256))
    logits = model(src, tgt[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten()).backward()
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
@pytest.mark.parametrize("cross_attention", ["linformer", "full"])
def test_every_parameter_has_a_gradient_at_every_length(sharing, cross_attention):
    for options in ({}, {"reversible": True}, {"checkpoint_level": "C2"}):
        model = make_encdec(parameter_sharing=sharing, cross_attention=cross_attention, **options)
        for s, t in ((1, 1), (5, 6), (13, 7)):
            model.zero_grad()
            model(source(2, s), tokens(2, t)).square().sum().backward()
            assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cross_attention": "full"},
        {"method": "mean", "open_slots": 2},
        {"method": "content"},
        {"method": "content", "parameter_sharing": "none"},
    ],
    ids=str,
)
def test_a_reversible_decoder_has_the_gradients_of_autograd(options, monkeypatch):
    """Towards its source too: a part of the memory that the recomputed pass is not told of would have none."""
    model, src, tgt = make_encdec(reversible=True, **options), source(2, SOURCE), tokens(2, TARGET)
    src_mask, tgt_mask = holes(2, SOURCE), holes(2, TARGET)
    found = run(model, src, tgt, src_mask, tgt_mask)
    monkeypatch.setattr(stack, "run_reversible", lambda x, branches, tensors, _: run_reversible(x, branches, (), False))
    assert_close(found, run(model, src, tgt, src_mask, tgt_mask))
