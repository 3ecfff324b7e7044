"""Models with content slots: causality, decoding, chunks, recomputation, export, precision and Hugging Face."""

import pytest
import torch
from model_cases import assert_padding_has_no_influence

from linformers import Linformer, LinformerEncDec, LinformerLM, stream
from linformers.projections.make import projection_parameters

BLOCK, K = 3, 5


def make_language(**options):
    options = {"input_size": None, "nhead": 2, "depth": 2, "block_size": BLOCK, "parameter_sharing": "none"} | options
    return LinformerLM(num_tokens=17, channels=8, dim_k=K, causal=True, method="content", **options).double().eval()


def make_stack(**options):
    options = {"input_size": None, "nhead": 2, "depth": 2} | options
    return Linformer(channels=8, dim_k=K, method="content", **options).double().eval()


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_no_output_depends_on_a_later_token(sharing, positions):
    model = make_language(parameter_sharing=sharing, positions=positions)
    x = torch.randn(1, 14, 8, dtype=torch.float64, requires_grad=True)
    out = model.body.run(x)
    for t in (0, 2, 3, 8, 12):
        (gradient,) = torch.autograd.grad(out[0, t, 0], x, retain_graph=True)
        assert not gradient[0, t + 1 :].any()
        assert gradient[0, : t + 1].any(-1).all()


@pytest.mark.parametrize("prompt", [1, 3, 6, 7, 13])
@pytest.mark.parametrize(("sharing", "kernel"), [("none", 0), ("layerwise", 5)])
def test_steps_equal_the_parallel_pass_at_any_length(prompt, sharing, kernel):
    model = make_language(parameter_sharing=sharing, local_kernel=kernel)
    tokens = torch.randint(17, (2, 31))
    state = model.body.linformer.new_state(2)
    sizes = [t.numel() for layer in state.layers for t in (layer.attention.past.keys, layer.attention.exact_keys)]
    with torch.no_grad():
        outs = [model.body(tokens[:, :prompt], state=state)]
        outs += [model.body.step(tokens[:, t], state)[:, None] for t in range(prompt, 31)]
        torch.testing.assert_close(torch.cat(outs, 1), model.body(tokens), rtol=1e-10, atol=1e-10)
    after = [t.numel() for layer in state.layers for t in (layer.attention.past.keys, layer.attention.exact_keys)]
    assert after == sizes


def test_a_causal_model_works_at_ten_times_the_length_of_training():
    """Which of two tokens has been more frequent so far: with no positions, and most of it in slots."""
    torch.manual_seed(0)
    model = (
        make_language(depth=1, block_size=5, positions="none", dropout=0, dropout_ff=0, dropout_tokens=0)
        .float()
        .train()
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def batch(rows, n):
        tokens = (torch.rand(rows, n) < torch.rand(rows, 1)).long()
        return tokens, (2 * tokens.cumsum(1) > torch.arange(1, n + 1)).long()

    for _ in range(60):
        tokens, wanted = batch(16, 30)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    tokens, wanted = batch(64, 300)
    with torch.no_grad():
        found = model.eval()(tokens).argmax(-1)
    assert (found == wanted)[:, 30:].float().mean() > 0.9
    assert 0.3 < wanted[:, 30:].float().mean() < 0.7


def test_ragged_prompts_and_rows_that_pause():
    model = make_language()
    tokens, lengths = torch.randint(17, (3, 16)), (16, 5, 9)
    mask = torch.arange(16) >= 16 - torch.tensor(lengths)[:, None]  # padding on the left
    together = model.generate(tokens, 9, mask=mask)
    for i, length in enumerate(lengths):
        alone = model.generate(tokens[i : i + 1, 16 - length :], 9)
        assert torch.equal(together[i, 16:], alone[0, length:])


def test_beams_move_the_sums_with_them():
    model = make_language()
    tokens = torch.randint(17, (2, 12))
    state = model.body.linformer.new_state(2)
    with torch.no_grad():
        model.body(tokens, state=state)
        state.reorder(torch.tensor([1, 1, 0]))
        out = model.body.step(torch.tensor([3, 4, 5]), state)
        rows = torch.cat([tokens[[1, 1, 0]], torch.tensor([[3], [4], [5]])], 1)
        torch.testing.assert_close(out, model.body(rows)[:, -1])


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_equal_the_whole(sharing, chunk):
    model = make_stack(parameter_sharing=sharing, local_kernel=3)
    x, mask = torch.randn(2, 61, 8, dtype=torch.float64), torch.arange(61) < torch.tensor([61, 40])[:, None]
    with torch.no_grad():
        torch.testing.assert_close(stream(model, x, mask, chunk=chunk)[mask], model(x, mask)[mask])


VARIANTS = [{}, {"local_window": BLOCK}, {"causal": True, "block_size": BLOCK}]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_recomputation_changes_nothing(options, sharing):
    kept = make_stack(parameter_sharing=sharing, **options)
    x, mask = torch.randn(2, 13, 8, dtype=torch.float64), torch.arange(13) < torch.tensor([13, 8])[:, None]

    def gradients(model):
        return torch.autograd.grad(model(x, mask)[mask].sin().sum(), list(model.parameters()))

    expected = gradients(kept)
    for level in ("C1", "C2"):
        model = make_stack(parameter_sharing=sharing, checkpoint_level=level, **options)
        model.load_state_dict(kept.state_dict())
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("options", VARIANTS)
def test_padding_equals_trimming_and_hides_everything(options):
    assert_padding_has_no_influence(make_stack(**options), torch.randn(2, 13, 8, dtype=torch.float64), real=8)


@pytest.mark.parametrize(
    "options", [pytest.param(v, marks=pytest.mark.thorough) if "local_window" in v else v for v in VARIANTS]
)
def test_compiled_and_exported(options):
    model = make_stack(input_size=40, depth=1, **options)
    x = torch.randn(2, 17, 8, dtype=torch.float64)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), model(x))
        length = torch.export.Dim("length", min=1, max=40)
        exported = torch.export.export(model, (x,), dynamic_shapes=({1: length},)).module()
        for n in (1, 4, 17, 40):
            y = torch.randn(2, n, 8, dtype=torch.float64)
            torch.testing.assert_close(exported(y), model(y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", VARIANTS)
def test_half_precision_is_near_and_finite(options, dtype):
    model = make_stack(**options).float()
    x = torch.randn(2, 40, 8)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", dtype):
            mixed = model(x)
        low = model.to(dtype)(x.to(dtype))
    for out in (mixed, low):
        assert out.isfinite().all()
        assert (out.float() - expected).norm() < 0.1 * expected.norm()


def test_a_source_in_content_slots():
    model = LinformerEncDec(
        num_tokens=17, enc_input_size=20, dec_input_size=9, channels=8, dim_k=K, method="content", nhead=2
    ).eval()
    source, mask = torch.randint(17, (2, 15)), torch.arange(15) < torch.tensor([15, 6])[:, None]
    target = torch.randint(17, (2, 7))
    with torch.no_grad():
        out = model(source, target, mask)
        torch.testing.assert_close(model(source[1:, :6], target[1:])[0], out[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"parameter_sharing": "none"}, {"cross_attention": "full"}])
def test_source_and_target_of_any_length(options):
    model = LinformerEncDec(num_tokens=17, channels=8, dim_k=K, method="content", nhead=2, **options).double().eval()
    assert model.encoder.body.input_size is model.decoder.body.input_size is None
    source, target = torch.randint(17, (2, 131)), torch.randint(17, (2, 139))
    mask = torch.arange(131) < torch.tensor([131, 71])[:, None]
    with torch.no_grad():
        out = model(source, target, mask)
        torch.testing.assert_close(model(source[1:, :71], target[1:])[0], out[1])
    assert model.generate(source, target[:, :1], max_new_tokens=2, src_mask=mask).shape == (2, 3)
    weights = [p for name, p in model.named_parameters() if "context_projection" in name or "cross.projection" in name]
    assert len(weights) == (0 if options.get("cross_attention") else 1)


def test_a_context_of_any_length_needs_slots_without_a_maximum():
    message = r"context_channels=8 without context_size, for a context of any length, needs method='content' or cross_attention='full'"
    with pytest.raises(ValueError, match=message):
        Linformer(12, 8, 4, context_channels=8)
    assert Linformer(12, 8, 4, context_channels=8, cross_attention="full").has_context
    assert not Linformer(12, 8, 4).has_context


@pytest.mark.parametrize("n", [1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_every_parameter_is_in_the_graph_of_every_batch(n):
    model = make_language().train()
    model(torch.randint(17, (2, n))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_choice_gets_the_whole_learning_rate():
    assert projection_parameters(make_stack()) == []
