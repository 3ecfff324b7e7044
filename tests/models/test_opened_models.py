"""Opened slots in layers and models: full attention as a limit, causality, decoding, recomputation, export and Hugging Face."""

import pytest
import torch
from model_cases import assert_padding_has_no_influence
from torch import nn

from linformers import LinearMultiheadAttention, Linformer, LinformerEncDec, LinformerLM, stream

D, N, BLOCK = torch.float64, 33, 4


def make_layer(**options):
    options = {"seq_len": 40, "proj_k": 8, "open_slots": 8, "batch_first": True, "dtype": D} | options
    layer = LinearMultiheadAttention(12, 3, method="mean", **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def full_like(layer, **options):
    full = nn.MultiheadAttention(12, 3, batch_first=True, dtype=D, **options)
    full.load_state_dict(layer.state_dict(), strict=False)
    return full


def make_stack(**options):
    return (
        Linformer(64, 16, 16, method="mean", **({"open_slots": 2, "norm": "pre", "depth": 2} | options)).double().eval()
    )


def make_language(**options):
    options = {"nhead": 4, "kv_heads": 2, "depth": 2, "block_size": BLOCK, "open_slots": 2} | options
    return LinformerLM(30, 64, 16, 32, causal=True, method="mean", **options).double().eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"local_window": BLOCK}, {"add_bias_kv": True, "add_zero_attn": True}, {"proj_k": 40, "open_slots": 1}],
)
def test_everything_open_is_full_attention(options):
    """With as many opened as there are slots; and with one token a slot, for any number of opened ones."""
    layer = make_layer(**options)
    full = full_like(layer, **{name: True for name in options if name.startswith("add")})
    x, ignored = torch.randn(2, N, 12, dtype=D), torch.zeros(2, N, dtype=torch.bool)
    ignored[1, 20:] = ignored[0, 5] = True
    torch.testing.assert_close(layer(x, x, x, ignored)[0], full(x, x, x, ignored)[0], rtol=1e-12, atol=1e-12)
    if not options.get("local_window"):
        query = torch.randn(2, 7, 12, dtype=D)
        torch.testing.assert_close(layer(query, x, x, ignored)[0], full(query, x, x, ignored)[0])


def test_everything_open_is_causal_full_attention():
    layer = make_layer(causal=True, block_size=BLOCK, proj_k=20, open_slots=20)
    x, mask = torch.randn(2, N, 12, dtype=D), nn.Transformer.generate_square_subsequent_mask(N, dtype=D)
    out, weights = layer(x, x, x)
    torch.testing.assert_close(out, full_like(layer)(x, x, x, attn_mask=mask)[0], rtol=1e-12, atol=1e-12)
    assert weights.shape == (2, N, 20 + 2 * BLOCK)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, N, dtype=D))


VARIANTS = [{}, {"local_window": BLOCK}, {"causal": True, "block_size": BLOCK}]


@pytest.mark.parametrize("options", VARIANTS)
def test_padding_equals_trimming_and_hides_everything(options):
    assert_padding_has_no_influence(make_stack(**options), torch.randn(2, 50, 16, dtype=D), real=31)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("level", ["C1", "C2"])
def test_recomputation_opens_the_same_slots(options, level):
    x, mask = torch.randn(2, 50, 16, dtype=D), torch.arange(50) < torch.tensor([50, 31])[:, None]

    def gradients(model):
        return torch.autograd.grad(model(x, mask)[mask].sin().sum(), list(model.parameters()))

    kept, again = make_stack(**options), make_stack(checkpoint_level=level, **options)
    again.load_state_dict(kept.state_dict())
    torch.testing.assert_close(gradients(again), gradients(kept))


def test_a_reversible_stack_opens_the_same_slots_again(monkeypatch):
    """What it recomputes is rounded: with the choice made anew, gradients would be those of other slots."""
    from linformers.nn import core

    made = []
    attend = core.attend_opened

    def watched(*tensors, choice, **options):
        out, weights, slots = attend(*tensors, choice=choice, **options)
        made.append((choice is not None, slots))
        return out, weights, slots

    monkeypatch.setattr(core, "attend_opened", watched)
    model = make_stack(reversible=True)
    model(torch.randn(2, 50, 16, dtype=D)).sin().sum().backward()
    again = [slots for known, slots in made if known]
    first = [slots for known, slots in made if not known]
    assert len(first) == len(again) == 2
    assert all(any(torch.equal(x, y) for y in first) for x in again)


@pytest.mark.parametrize("reach", [None, 12, 40])
@pytest.mark.parametrize("prompt", [1, 9, 23])
def test_steps_equal_the_parallel_pass(prompt, reach):
    model = make_language(open_reach=reach)
    tokens = torch.randint(30, (3, 60))
    state = model.body.linformer.new_state(3)
    with torch.no_grad():
        outs = [model.body(tokens[:, :prompt], state=state)]
        outs += [model.body.step(tokens[:, t], state)[:, None] for t in range(prompt, 60)]
        torch.testing.assert_close(torch.cat(outs, 1), model.body(tokens), rtol=1e-10, atol=1e-10)
    assert state.layers[0].attention.exact_keys.shape[2] == (64 if reach is None else reach)


def test_ragged_prompts_and_moved_rows():
    model = make_language()
    tokens, lengths = torch.randint(30, (3, 40)), (40, 13, 27)
    mask = torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]
    together = model.generate(tokens, 9, mask=mask)
    for i, length in enumerate(lengths):
        assert torch.equal(together[i, 40:], model.generate(tokens[i : i + 1, 40 - length :], 9)[0, length:])
    state = model.body.linformer.new_state(2)
    with torch.no_grad():
        model.body(tokens[:2], state=state)
        state.reorder(torch.tensor([1, 1, 0]))
        out = model.body.step(torch.tensor([3, 4, 5]), state)
        rows = torch.cat([tokens[[1, 1, 0]], torch.tensor([[3], [4], [5]])], 1)
        torch.testing.assert_close(out, model.body(rows)[:, -1])


def test_no_output_depends_on_a_later_token():
    model = make_language()
    x = torch.randn(1, 30, 16, dtype=D, requires_grad=True)
    out = model.body.run(x)
    for t in (0, 7, 8, 17, 28):
        (gradient,) = torch.autograd.grad(out[0, t, 0], x, retain_graph=True)
        assert not gradient[0, t + 1 :].any()


# Each pattern alone is compiled and exported in ops/test_opened_graphs.py.
@pytest.mark.parametrize("options", [VARIANTS[0], *(pytest.param(v, marks=pytest.mark.thorough) for v in VARIANTS[1:])])
def test_compiled_and_exported(options):
    model, x = make_stack(depth=1, **options), torch.randn(2, 50, 16, dtype=D)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
        length = torch.export.Dim("length", min=1, max=64)
        exported = torch.export.export(model, (x,), dynamic_shapes=({1: length},)).module()
        for n in (1, 9, 64):
            y = torch.randn(2, n, 16, dtype=D)
            torch.testing.assert_close(exported(y), model(y))


def test_a_decoder_opens_what_it_needs_of_its_source():
    sizes = {"num_tokens": 50, "enc_input_size": 40, "dec_input_size": 32, "channels": 16, "dim_k": 8, "nhead": 2}
    model = LinformerEncDec(**sizes, method="mean", open_slots=2, open_reach=30).double().eval()
    source, target = torch.randint(50, (2, 33)), torch.randint(50, (2, 20))
    mask = torch.arange(33) < torch.tensor([33, 14])[:, None]
    with torch.no_grad():
        out = model(source, target, mask)
        torch.testing.assert_close(model(source[1:, :14], target[1:])[0], out[1])
        assert model.generate(source, target[:, :1], max_new_tokens=7).shape == (2, 8)
    everything = LinformerEncDec(**sizes, method="mean", open_slots=8).double().eval()
    exact = LinformerEncDec(**sizes, method="mean", open_slots=8, cross_attention="full").double().eval()
    exact.load_state_dict(everything.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(everything(source, target, mask), exact(source, target, mask))


def test_another_number_can_be_opened_after_training():
    few, many = make_stack(open_slots=1), make_stack(open_slots=16)
    many.load_state_dict(few.state_dict())
    x = torch.randn(1, 40, 16, dtype=D)
    assert not torch.allclose(few(x), many(x))


def test_refusals_say_what_to_do():
    with pytest.raises(
        ValueError, match=r"open_slots=2 needs slots that are means of segments, and those of method='learnable'"
    ):
        Linformer(64, 16, 16, open_slots=2)
    with pytest.raises(
        ValueError, match=r"open_slots=2 needs slots that are means of segments, and those of Dense are not"
    ):
        LinearMultiheadAttention(12, 3, open_slots=2)
    with pytest.raises(ValueError, match=r"open_reach=5 has no meaning without open_slots"):
        Linformer(64, 16, 16, open_reach=5)
    with pytest.raises(ValueError, match=r"open_reach=5 is for causal=True: an encoder has all keys at once"):
        Linformer(64, 16, 16, method="mean", open_slots=2, open_reach=5)
    with pytest.raises(ValueError, match=r"open_slots=2 has no meaning with attention='full'"):
        Linformer(64, 16, 16, method="mean", attention="full", open_slots=2)
    with pytest.raises(ValueError, match=r"open_slots needs exact keys of the whole sequence"):
        stream(make_stack(), torch.randn(1, 40, 16, dtype=D))
    with pytest.raises(ValueError, match=r"open_slots must not be negative, got -1"):
        LinearMultiheadAttention(12, 3, method="mean", open_slots=-1)
    with pytest.raises(ValueError, match=r"open_reach must be at least 1, got 0"):
        LinearMultiheadAttention(12, 3, method="mean", open_slots=2, open_reach=0, causal=True)
    with pytest.raises(ValueError, match=r"open_reach=5 has no meaning without open_slots"):
        LinearMultiheadAttention(12, 3, method="mean", open_reach=5, causal=True)
    with pytest.raises(ValueError, match=r"open_reach=5 has no meaning with causal=False"):
        LinearMultiheadAttention(12, 3, method="mean", open_slots=2, open_reach=5)
