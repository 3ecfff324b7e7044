import inspect

import pytest
import torch
from comparison import SHARINGS, assert_close, outputs_and_gradients
from model_cases import (
    CHANNELS,
    SOURCE,
    SOURCE_VOCABULARY,
    TARGET,
    VOCABULARY,
    by_name,
    changed,
    holes,
    make_causal_lm,
    make_encdec,
    tokens,
)
from model_cases import source_ids as source
from safetensors.torch import load_model, save_model

from linformers import LinformerEncDec
from linformers.nn.state import DecodingState
from linformers.projections.base import Projection

VARIANTS = {
    "plain": {},
    "sharing none": {"parameter_sharing": "none"},
    "mean": {"method": "mean"},
    "post-norm, no mixing": {"norm": "post", "local_kernel": 0},
    "windowed encoder": {"local_window": 3},
    "full": {"attention": "full"},
    "no self-attention": {"attention": "none"},
    "full cross-attention": {"cross_attention": "full"},
    "full cross-attention, sharing none": {"cross_attention": "full", "parameter_sharing": "none"},
    "slots of the source only": {"attention": "full", "cross_attention": "linformer"},
    "slots of the source only, sharing kv": {
        "attention": "none",
        "cross_attention": "linformer",
        "parameter_sharing": "kv",
    },
    "reversible": {"reversible": True},
    "C2": {"checkpoint_level": "C2"},
    "rotary": {"positions": "rotary", "dim_d": 4},
    "narrow embeddings": {"enc_emb_dim": 7, "dec_emb_dim": 5},
    "inner width": {"ff_intermediate": 8, "dim_d": 3},
}


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
    with pytest.raises(ValueError, match=r"batch of 2 .* 3"):
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


# Generation


@torch.no_grad()
def naive(model, src, prompt, count, src_mask=None):
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(src, ids, src_mask)[:, -1].argmax(-1)[:, None]], 1)
    return ids


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("options", **by_name(VARIANTS))
def test_greedy_equals_the_naive_loop(options, length):
    model, src, prompt = make_encdec(**options).eval(), source(2, SOURCE), tokens(2, length)
    mask = holes(2, SOURCE)
    count = TARGET - length
    assert torch.equal(model.generate(src, prompt, count, src_mask=mask), naive(model, src, prompt, count, mask))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_padded_source_gives_the_same_tokens(beams):
    model, src, prompt = make_encdec().eval(), source(2, SOURCE), tokens(2, 1)
    mask = torch.arange(SOURCE) < torch.tensor([[SOURCE], [5]])
    found = model.generate(src, prompt, 9, src_mask=mask, num_beams=beams)
    assert torch.equal(found[:1], model.generate(src[:1], prompt[:1], 9, num_beams=beams))
    assert torch.equal(found[1:], model.generate(src[1:, :5], prompt[1:], 9, num_beams=beams))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts_equal_each_alone(side):
    model, src = make_encdec().eval(), source(2, SOURCE)
    prompt = tokens(2, 4)
    mask = torch.arange(4) >= torch.tensor([[0], [3]]) if side == "left" else torch.arange(4) < torch.tensor([[4], [1]])
    found = model.generate(src, prompt, 7, mask=mask)
    for row in range(2):
        alone = prompt[row : row + 1, mask[row]]
        assert torch.equal(found[row, 4:], naive(model, src[row : row + 1], alone, 7)[0, alone.shape[1] :])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}], ids=str)
def test_the_source_is_read_and_compressed_once(options):
    model, src = make_encdec().eval(), source(2, SOURCE)
    read, compressed = [], []
    model.encoder.body.linformer.register_forward_hook(lambda *_: read.append(1))
    for layer in model.decoder.body.linformer.layers:
        layer.cross.k_proj.register_forward_hook(lambda *_: compressed.append(1))
    model.generate(src, tokens(2, 1), 9, **options)
    assert len(read) == 1
    assert len(compressed) == model.decoder.body.linformer.depth


def test_a_memory_serves_any_number_of_targets():
    model, src = make_encdec(), source(2, SOURCE)
    memory = model.encode(src)
    assert [m.keys.shape for m in memory] == 2 * [(2, 2, 8, CHANNELS // 2)]
    for length in (1, 5, TARGET):
        tgt = tokens(2, length)
        torch.testing.assert_close(model.decoder(tgt, memory=memory), model(src, tgt))


def test_a_stream_yields_the_same_tokens():
    model, src, prompt = make_encdec().eval(), source(2, SOURCE), tokens(2, 1)
    mask = holes(2, SOURCE)
    for options in ({}, {"temperature": 1.0, "seed": 2}, {"eos_token": 3}):
        found = torch.stack(list(model.stream(src, prompt, 9, src_mask=mask, **options)), 1)
        assert torch.equal(found, model.generate(src, prompt, 9, src_mask=mask, **options)[:, 1:])


def test_too_many_tokens_are_an_error():
    with pytest.raises(ValueError, match=rf"prompt of 2 and {TARGET} new tokens .* {TARGET} positions"):
        make_encdec().generate(source(1, 5), tokens(1, 2), TARGET)


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


@pytest.mark.parametrize("cross_attention", ["linformer", "full"])
def test_beams_share_the_memory_of_their_source(cross_attention, monkeypatch):
    model = make_encdec(cross_attention=cross_attention).eval()
    src, prompt, mask = source(3, 7), tokens(3, 1), holes(3, 7)
    places = []
    original = DecodingState.reorder

    def reorder(self, index):
        original(self, index)
        places.append([t.data_ptr() for layer in self.layers for t in layer.memory if t is not None])

    def copy(self, index):
        self.source = torch.arange(len(self.length))  # as if every row had a source of its own
        original(self, index)

    monkeypatch.setattr(DecodingState, "reorder", reorder)
    found = model.generate(src, prompt, 9, src_mask=mask, num_beams=4)
    assert len(places) == 9
    assert all(place == places[0] for place in places)
    monkeypatch.setattr(DecodingState, "reorder", copy)
    assert torch.equal(found, model.generate(src, prompt, 9, src_mask=mask, num_beams=4))


def test_reordering_across_sources_moves_their_memories():
    model = make_encdec().eval()
    src, tgt, index = source(3, 7), tokens(3, 5), torch.tensor([2, 2, 0, 1, 1])
    state = model.decoder.new_state(3)
    model.decoder(tgt, memory=model.encode(src), state=state)
    for move in (index, torch.tensor([1, 0, 2, 4, 3]), torch.tensor([3, 2, 1, 0, 4])):
        state.reorder(move)
        src, tgt = src[move], tgt[move]
    again = model.decoder.new_state(5)
    model.decoder(tgt, memory=model.encode(src), state=again)
    ids = tokens(5)
    torch.testing.assert_close(model.decoder.step(ids, state), model.decoder.step(ids, again))


def test_a_model_in_training_mode_reads_the_source_without_dropout():
    model = make_encdec(dropout=0.4, dropout_ff=0.4, dropout_tokens=0.4)
    src, prompt = source(2, 7), tokens(2, 1)
    found = model.generate(src, prompt, 9)
    streamed = torch.stack(list(model.stream(src, prompt, 9)), 1)
    assert all(module.training for module in model.modules())
    expected = model.eval().generate(src, prompt, 9)
    assert torch.equal(found, expected)
    assert torch.equal(streamed, expected[:, 1:])


# A decoder for another encoder


def make_decoder(**options):
    """Reads contexts of at most 13 positions and 7 channels."""
    return make_causal_lm(context_size=13, context_channels=7, **options)


@pytest.mark.parametrize("cross_attention", ["linformer", "full"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_context_is_its_memory(cross_attention, masked):
    model = make_decoder(cross_attention=cross_attention)
    context = torch.randn(2, 11, 7, dtype=torch.float64, requires_grad=True)
    ids, mask, context_mask = tokens(2, 5), holes(2, 5), holes(2, 11) if masked else None
    parameters = dict(model.named_parameters())

    def by_memory():
        return [
            model(ids, mask, memory=model.body.linformer.memory(context, context_mask)).masked_fill(~mask[..., None], 0)
        ]

    def by_context():
        return [model(ids, mask, context=context, context_mask=context_mask).masked_fill(~mask[..., None], 0)]

    found, expected = (outputs_and_gradients(run, {"context": context}, parameters) for run in (by_context, by_memory))
    assert_close(found, expected)
    assert found["gradient of context"].any()


@pytest.mark.parametrize("beams", [1, 3])
def test_a_context_is_read_while_generating(beams):
    model = make_decoder().eval()
    context, mask, prompt = torch.randn(2, 11, 7, dtype=torch.float64), holes(2, 11), tokens(2, 3)
    given = {"context": context, "context_mask": mask}
    found = model.generate(prompt, 9, num_beams=beams, **given)
    assert torch.equal(found, model.generate(prompt, 9, num_beams=beams, memory=model.memory(context, mask)))
    if beams == 1:
        naive = prompt
        for _ in range(9):
            naive = torch.cat([naive, model(naive, **given)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(found, naive)
        assert torch.equal(torch.stack(list(model.stream(prompt, 9, **given)), 1), found[:, 3:])


def test_an_encoder_and_a_decoder_are_an_encoder_decoder():
    model = make_encdec().eval()
    src, tgt, mask = source(3, 7), tokens(3, 5), holes(3, 7)
    found = model.decoder(tgt, context=model.encoder(src, mask), context_mask=mask)
    torch.testing.assert_close(found, model(src, tgt, src_mask=mask), rtol=0, atol=0)


def test_a_context_that_does_not_fit_is_an_error():
    model, ids, context = make_decoder(), tokens(2, 3), torch.randn(2, 11, 7, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    for run in (model, lambda *a, **o: model.generate(*a, 2, **o), lambda *a, **o: model.stream(*a, 2, **o)):
        for options, message in (
            ({"context": context, "memory": model.memory(context)}, "give one of memory and context"),
            ({"context_mask": mask}, "context_mask has no meaning without context"),
            ({"context": context[..., :5]}, r"context_channels=7\), got \(2, 11, 5\)"),
            ({"context": context, "context_mask": mask[:, :3]}, r"\(2, 11\), got \(2, 3\)"),
        ):
            with pytest.raises(ValueError, match=message):
                run(ids, **options)
    with pytest.raises(ValueError, match=r"context_size.*or LinformerLM the context"):
        model(ids)
    with pytest.raises(ValueError, match="a batch of 2 with a memory of 1 rows"):
        model(ids, context=context[:1])
    with pytest.raises(ValueError, match="build it with context_size"):
        make_causal_lm()(ids, context=context)
