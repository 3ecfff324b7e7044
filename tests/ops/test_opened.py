"""Opened slots against plain loops, and their laws: outputs, weights, choices and gradients."""

import pytest
import reference_opened
import torch
from comparison import assert_close, outputs_and_gradients
from opened_cases import PATTERNS, attend_means
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from linformers.ops import opened, opened_cpu, opened_parts
from linformers.ops.gathered import attend_gathered, choose
from linformers.ops.opened import Opening
from linformers.ops.seen import block_owners, find_segments, kept_segments, see_at, segment_means, segment_owners

B, H, D = 2, 2, 5
MASKS = ("none", "trailing", "holes", "empty row")
N, C, R, K = 23, 4, 2, 7  # a window of 4 or segments of 3 or 4 positions: some reach across the edges of blocks


@pytest.fixture(autouse=True, params=["gathered", "masked", "tiles", "tiles in chunks"])
def form(request, monkeypatch):
    """Each implementation; the one with tiles also with few queries, units and slots at a time."""
    name, tiles = request.param.split()[0], opened._form
    monkeypatch.setattr(opened, "SHORT", 0)
    monkeypatch.setattr(opened, "_form", lambda *args: tiles(*args) if name == opened.TILES else name)
    if request.param == "tiles in chunks":
        monkeypatch.setattr(opened_cpu, "SCORES", 100)
        monkeypatch.setattr(opened_parts, "GROUP", 3)
        monkeypatch.setattr(opened_parts, "GROUPS_FROM", 1)
    return request.param


def make_keep(kind: str, n: int = N) -> Tensor | None:
    if kind == "none":
        return None
    keep = torch.arange(n) < torch.tensor([n, max(1, n - 6)])[:, None]
    if kind == "holes":
        keep = torch.rand(B, n) < 0.6
    elif kind == "empty row":
        keep[1] = False
    return keep


def make_opening(pattern: str, m: int, keep: Tensor | None = None, n: int = N, **changes) -> tuple[Opening, int]:
    """What can be opened, and how many slots there are."""
    device = torch.device("cpu")
    if pattern == "causal":
        owner = block_owners(n, C, R, keep, device)
        return Opening(owner, -(-C // R), m, C, R)._replace(**changes), max(0, -(-n // C) - 2) * R
    owner = segment_owners(n, n, K, keep, device)
    return Opening(owner, -(-n // K), m, C if pattern == "window" else 0)._replace(**changes), K


def make_inputs(kv_heads: int = H, n: int = N, h: int = H, **options) -> dict[str, Tensor]:
    shapes = {"q": (B, h, n, D), "k": (B, kv_heads, n, D), "v": (B, kv_heads, n, D)}
    options = {"dtype": torch.float64} | options
    return {name: torch.randn(shape, **options).requires_grad_() for name, shape in shapes.items()}


def run(inputs: dict[str, Tensor], opening: Opening, slots: int, weights: bool = False, **options):
    """From exact keys alone: slots are their means."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, shown, choice = attend_means(q, k, v, opening, slots, need_weights=weights, **options)
    return (out, shown, choice) if weights else (out, choice)


def sees(pattern: str, opening: Opening):
    if pattern == "causal":
        return reference_opened.causally(C, R, opening.reach)
    return reference_opened.through_window(C) if pattern == "window" else reference_opened.everything


def expected(inputs, pattern, opening, slots):
    owner = opening.owner.expand(len(inputs["q"]), -1)
    extra = None if opening.keys is None else (opening.keys, opening.values)
    return reference_opened.attend(
        inputs["q"], inputs["k"], inputs["v"], owner, slots, opening.open_slots, sees(pattern, opening), extra
    )


def columns(all_weights, opening, slots, shape) -> Tensor:
    """The reference's weights in the columns that the package shows."""
    (b, h, n), c, owner = shape, opening.block, opening.owner.expand(shape[0], -1)
    more = (2 if opening.slots_per_block is not None else 3) * c if c else 0
    extra = 0 if opening.keys is None else opening.keys.shape[2]
    rows = []
    for index, weights in enumerate(all_weights):
        sample, i = index // (h * n), index % n
        row = [torch.zeros((), dtype=torch.float64)] * (slots + more + extra)
        for (kind, t), weight in weights.items():
            first = (i // c - 1) * c if c else 0
            if kind == "extra":
                column = slots + t
            elif kind == "slot":
                column = t
            else:
                column = slots + t - first if 0 <= t - first < more else int(owner[sample, t])
            row[column] = row[column] + weight
        rows.append(torch.stack(row))
    return torch.stack(rows).view(b, h, n, -1)


LOOPS = {}  # what the loops gave for a case, which all implementations are compared with: they take longest


def by_loops(case, inputs, leaves, pattern, opening, slots):
    """Outputs and gradients with weights, those without, and the choices."""
    if case not in LOOPS:
        (b, h, n, _), results = inputs["q"].shape, []
        for shown in (True, False):

            def loops(shown=shown):
                out, choices, found = expected(inputs, pattern, opening, slots)
                results.append(choices)
                return (out, columns(found, opening, slots, (b, h, n)))[: 1 + shown]

            results.append(outputs_and_gradients(loops, leaves, {}))
        choices, with_weights, _, without = results
        LOOPS[case] = inputs["q"].detach(), with_weights, without, choices
    q, *wanted = LOOPS[case]
    assert torch.equal(q, inputs["q"])  # every test begins with the same seed
    return wanted


def compare(pattern, mask, m, kv_heads=H, n=N, h=H, **changes):
    inputs = make_inputs(kv_heads, n, h)
    opening, slots = make_opening(pattern, m, make_keep(mask, n), n, **changes)
    leaves = dict(inputs)
    if opening.keys is not None:
        leaves |= {"extra keys": opening.keys, "extra values": opening.values}
    case = pattern, mask, m, kv_heads, n, h, opening.reach, opening.keys is None
    with_weights, without, choices = by_loops(case, inputs, leaves, pattern, opening, slots)
    found = outputs_and_gradients(lambda: run(inputs, opening, slots, weights=True)[:2], leaves, {})
    assert_close(found, with_weights)
    assert_close(outputs_and_gradients(lambda: run(inputs, opening, slots)[:1], leaves, {}), without)
    choice = run(inputs, opening, slots)[1]
    for row, wanted in zip(choice.repeat_interleave(h // kv_heads, 1).flatten(0, 2), choices, strict=True):
        assert [j for j in row.tolist() if j >= 0] == wanted


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_the_loops(pattern, kv_heads, mask):
    compare(pattern, mask, 2, kv_heads)


@pytest.mark.parametrize("m", [0, 1, 3, 11])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_number_of_opened_slots_equals_the_loops(pattern, m):
    compare(pattern, "holes", m)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 11, 13])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_length_equals_the_loops(pattern, n):
    compare(pattern, "trailing", 2, n=n)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_neighbouring_heads_share_a_key_value_head(pattern):
    compare(pattern, "holes", 2, kv_heads=2, h=4, n=17)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("reach", [1, 9, 13, 100])
def test_reach_bounds_what_is_opened(reach, mask):
    compare("causal", mask, 2, reach=reach)


def test_exact_keys_that_are_in_no_slot_are_seen_by_all():
    extra = [torch.randn(B, 1, 3, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    compare("all", "holes", 2, kv_heads=1, keys=extra[0], values=extra[1])


def full(inputs, causal, keep):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril() if causal else mask
    mask = mask if keep is None else mask & keep[:, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_all_slots_open_it_is_full_attention(pattern, mask):
    inputs, keep = make_inputs(1), make_keep(mask)
    opening, slots = make_opening(pattern, 100, keep)
    wanted = outputs_and_gradients(lambda: [full(inputs, pattern == "causal", keep)], inputs, {})
    assert_close(outputs_and_gradients(lambda: run(inputs, opening, slots)[:1], inputs, {}), wanted, 1e-12, 1e-12)


@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_one_token_a_slot_it_is_full_attention(pattern, mask, m):
    inputs, keep, n = make_inputs(1), make_keep(mask), N
    if pattern == "causal":
        opening = Opening(block_owners(n, C, C, keep, torch.device("cpu")), 1, m, C, C)
        slots = n - n % C - C
    else:
        opening = Opening(segment_owners(n, n, n, keep, torch.device("cpu")), 1, m, C if pattern == "window" else 0)
        slots = n
    wanted = outputs_and_gradients(lambda: [full(inputs, pattern == "causal", keep)], inputs, {})
    assert_close(outputs_and_gradients(lambda: run(inputs, opening, slots)[:1], inputs, {}), wanted, 1e-12, 1e-12)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_query_of_zeros_gives_the_mean_of_the_values(pattern, m):
    inputs, keep = make_inputs(1), make_keep("holes")
    inputs["q"] = torch.zeros_like(inputs["q"])
    opening, slots = make_opening(pattern, m, keep)
    torch.testing.assert_close(run(inputs, opening, slots)[0], full(inputs, pattern == "causal", keep))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_of_equal_slots_the_earlier_is_opened(pattern):
    inputs = {name: x.detach() for name, x in make_inputs(1).items()}
    inputs["k"] = torch.eye(D, dtype=torch.float64)[:1].expand(B, 1, N, D)  # one product a logit: nothing is rounded
    opening, slots = make_opening(pattern, 3, torch.ones(B, N, dtype=torch.bool))
    choice = run(inputs, opening, slots)[1]
    counts = find_segments(opening.owner, slots, opening.width).tokens
    for b in range(B):
        segments = {j: [t for t in range(N) if opening.owner[b, t] == j] for j in range(slots)}
        for i in range(N):
            openable = sees(pattern, opening)(i, segments)[1]
            wanted = sorted(openable, key=lambda j: (-int(counts[b, j]), j))[: opening.open_slots]
            assert [j for j in choice[b, 0, i].tolist() if j >= 0] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [1, 7, 64, 129, 1031])
def test_the_first_maximum_is_chosen(slots, dtype):
    """At all places of what the processor takes at once, and where threads divide the work."""
    logits = torch.randint(0, 3, (211, slots)).to(dtype)
    choice = choose(logits, 4)
    for row, found in zip(logits.tolist(), choice.tolist(), strict=True):
        assert found == sorted(range(slots), key=lambda j: (-row[j], j))[:4]
    assert choose(torch.full((2, slots), -torch.inf), 1).tolist() == [[-1], [-1]]


def test_the_gradient_to_later_inputs_is_exactly_zero():
    inputs = make_inputs(1)
    opening, slots = make_opening("causal", 2)
    for t in (0, 7, 11, 17, 22):
        out = run(inputs, opening, slots)[0]
        gradients = torch.autograd.grad(out[:, :, t].sum(), list(inputs.values()))
        assert all((gradient[:, :, t + 1 :] == 0).all() for gradient in gradients)
        assert (gradients[2][:, :, : t + 1] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_huge_logits_give_no_nan(pattern, dtype):
    inputs = {name: (30 * x.detach()).to(dtype).requires_grad_() for name, x in make_inputs(1).items()}
    opening, slots = make_opening(pattern, 2, make_keep("empty row"))
    found = outputs_and_gradients(lambda: run(inputs, opening, slots)[:1], inputs, {})
    assert all(x.isfinite().all() for x in found.values())
    assert run(inputs, opening, slots)[0].dtype == dtype


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_masked_has_no_influence(pattern):
    inputs, keep = {name: x.detach() for name, x in make_inputs(1).items()}, make_keep("holes")
    opening, slots = make_opening(pattern, 2, keep)
    before = run(inputs, opening, slots)[0]
    for name in ("k", "v"):
        inputs[name] = torch.where(keep[:, None, :, None], inputs[name], 1e3 * torch.randn_like(inputs[name]))
    assert torch.equal(before, run(inputs, opening, slots)[0])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_kept_choice_is_used_again(pattern):
    inputs = make_inputs(1)
    opening, slots = make_opening(pattern, 2)
    before, choice = run(inputs, opening, slots)
    again, same = run(inputs, opening, slots, choice=choice)
    assert torch.equal(before, again)
    assert torch.equal(choice, same)
    other = choice.flip(-1)  # in another order they are the same slots
    torch.testing.assert_close(run(inputs, opening, slots, choice=other)[0], before)
    nothing = torch.full_like(choice, -1)
    closed, slots = make_opening(pattern, 0)
    torch.testing.assert_close(run(inputs, opening, slots, choice=nothing)[0], run(inputs, closed, slots)[0])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_weights_are_in_the_graph_and_add_up_to_one(pattern):
    inputs = make_inputs(1)
    opening, slots = make_opening(pattern, 2)
    out, weights, _ = run(inputs, opening, slots, weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    (gradient,) = torch.autograd.grad(out.sum(), weights)
    assert (gradient != 0).any()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_through_vanishing_weights_are_those_without_weights(pattern):
    inputs = {name: x.detach() for name, x in make_inputs(1, dtype=torch.float32).items()}
    opening, slots = make_opening(pattern, 2)
    for scale in torch.linspace(5, 40, 8):  # the inverse of a weight of 1e-39 is not finite
        leaves = {name: (scale * x if name == "q" else x.clone()).requires_grad_() for name, x in inputs.items()}
        found, wanted = (
            outputs_and_gradients(lambda w=w, x=leaves: run(x, opening, slots, weights=w)[:1], leaves, {})
            for w in (True, False)
        )
        assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_dropout_drops_weights(pattern):
    inputs = make_inputs(1)
    opening, slots = make_opening(pattern, 2)
    out, weights, _ = run(inputs, opening, slots, weights=True, dropout=0.4)
    assert (weights.sum(-1) - 1).abs().max() > 0.1
    assert (out - run(inputs, opening, slots)[0]).abs().max() > 0.1
    inputs["v"] = torch.ones_like(inputs["v"])
    draws = torch.stack([run(inputs, opening, slots, dropout=0.4)[0][..., 0] for _ in range(20)])
    assert (draws - 1).abs().max() > 0.1
    assert (draws.mean() - 1).abs() < 0.03


@pytest.mark.parametrize("reach", [None, 13])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_step_by_step_equals_the_parallel_pass(mask, reach):
    inputs, keep = {name: x.detach() for name, x in make_inputs(1).items()}, make_keep(mask)
    opening, slots = make_opening("causal", 2, keep, reach=reach)
    parallel, choices = run(inputs, opening, slots)
    real = torch.ones(B, N, dtype=torch.bool) if keep is None else keep
    segments = find_segments(opening.owner, slots, opening.width)
    means = segment_means(inputs["k"], segments), segment_means(inputs["v"], segments)
    kept = N if reach is None else max(reach, 2 * C)
    place = torch.arange(N) % kept
    for position in range(N):
        k, v = (torch.full((B, 1, kept, D), torch.nan, dtype=torch.float64) for _ in range(2))
        there = torch.zeros(B, kept, dtype=torch.bool)
        for t in range(max(0, position + 1 - kept), position + 1):
            k[:, :, place[t]], v[:, :, place[t]] = inputs["k"][:, :, t], inputs["v"][:, :, t]
            there[:, place[t]] = real[:, t]
        k, v = (x.nan_to_num(1e3) for x in (k, v))  # places that hold no token are never read
        held = kept_segments(there, segments.tokens.expand(B, -1), block=C, slots_per_block=R)
        at = torch.full((B,), position)
        seen = see_at(k, v, there, at, held, block=C, slots_per_block=R, reach=reach)
        q = inputs["q"][:, :, position : position + 1]
        out, _, choice = attend_gathered(q, k, v, *means, held, seen, open_slots=2)
        torch.testing.assert_close(out, parallel[:, :, position : position + 1])
        assert torch.equal(choice, choices[:, :, position : position + 1])
