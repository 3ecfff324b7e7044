"""Exact neighbours and slots in one softmax, bidirectional and causal, against loops."""

import pytest
import reference_blocks
import torch
from comparison import assert_close, outputs_and_gradients
from covering import covering

from linformers.ops.blocks import attend_blocks, attend_blocks_with_weights

SLOTS = 7
PATTERNS = {"causal": 2, "causal, no slots": 0, "both ways": None}
MASKS = ("none", "trailing", "holes", "empty row")


def make(n, block, per_block, kv_heads, d=5, b=2, h=2):
    """Queries, keys, values and slots, with as many slots as the pattern has: those of all blocks but two."""
    if per_block is None:
        slots = SLOTS
    else:
        slots = max(0, -(-n // block) - 2) * per_block
    shapes = [(b, h, n, d)] + 2 * [(b, kv_heads, n, d)] + 2 * [(b, kv_heads, slots, d)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def make_masks(kind, n, slots, b=2):
    if kind == "none":
        return None, None
    keep = torch.arange(n) < torch.tensor([n, max(1, n - 4)])[:, None]
    slot_keep = torch.ones(b, slots, dtype=torch.bool)
    if kind == "holes":
        keep = torch.rand(b, n) < 0.6
        slot_keep = torch.rand(b, slots) < 0.6
    elif kind == "empty row":
        keep[1] = False
        slot_keep[1] = False
    return keep, slot_keep


def compare(n, block, per_block, kv_heads, kind, h=2):
    tensors = make(n, block, per_block, kv_heads, h=h)
    keep, slot_keep = make_masks(kind, n, tensors[3].shape[2])
    options = {"block": block, "slots_per_block": per_block, "keep": keep, "slot_keep": slot_keep}
    named = dict(zip(("q", "k", "v", "slot_keys", "slot_values"), tensors, strict=True))
    expected = outputs_and_gradients(lambda: reference_blocks.attend_blocks(*tensors, **options), named, {})
    assert_close(outputs_and_gradients(lambda: attend_blocks_with_weights(*tensors, **options), named, {}), expected)
    only_output = outputs_and_gradients(lambda: reference_blocks.attend_blocks(*tensors, **options)[:1], named, {})
    assert_close(outputs_and_gradients(lambda: [attend_blocks(*tensors, **options)], named, {}), only_output)


@pytest.mark.parametrize(**covering(mask=MASKS, kv_heads=[1, 2], per_block=PATTERNS))
def test_blocks_equal_the_reference(per_block, kv_heads, mask):
    compare(11, 3, per_block, kv_heads, mask)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 9, 13])
@pytest.mark.parametrize("per_block", PATTERNS.values(), ids=PATTERNS)
def test_any_length_equals_the_reference(per_block, n):
    compare(n, 3, per_block, 1, "holes")


@pytest.mark.parametrize("block", [1, 2, 5, 7, 11])
@pytest.mark.parametrize("per_block", PATTERNS.values(), ids=PATTERNS)
def test_any_block_equals_the_reference(per_block, block):
    compare(7, block, per_block, 1, "trailing")


@pytest.mark.parametrize("per_block", PATTERNS.values(), ids=PATTERNS)
def test_neighbouring_heads_share_a_key_value_head(per_block):
    compare(7, 3, per_block, 2, "holes", h=4)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_a_block_as_long_as_the_input_is_full_attention(causal):
    q, k, v, *_ = make(7, 7, 0, 1)
    none = k[:, :, :0]
    out = attend_blocks(q, k, v, none, none, block=7, slots_per_block=0 if causal else None)
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, full)


@pytest.mark.parametrize("per_block", PATTERNS.values(), ids=PATTERNS)
def test_weights_are_zero_or_add_up_to_one(per_block):
    q, k, v, slot_k, slot_v = make(11, 3, per_block, 1)
    keep, slot_keep = make_masks("empty row", 11, slot_k.shape[2])
    _, weights = attend_blocks_with_weights(
        q, k, v, slot_k, slot_v, block=3, slots_per_block=per_block, keep=keep, slot_keep=slot_keep
    )
    total = weights.sum(-1)
    torch.testing.assert_close(total[0], torch.ones_like(total[0]))
    assert not total[1].any()


def test_dropout_drops_weights_and_scales_the_others():
    q, k, v, slot_k, slot_v = make(11, 3, None, 1)
    options = {"block": 3, "slots_per_block": None}
    out, plain = attend_blocks_with_weights(q, k, v, slot_k, slot_v, **options)
    _, dropped = attend_blocks_with_weights(q, k, v, slot_k, slot_v, dropout=0.5, **options)
    stays = dropped != 0
    assert 0 < stays.double().mean() < 1
    torch.testing.assert_close(dropped[stays], 2 * plain[stays])
    assert not torch.allclose(attend_blocks(q, k, v, slot_k, slot_v, dropout=0.5, **options), out)


@pytest.mark.parametrize("per_block", PATTERNS.values(), ids=PATTERNS)
def test_an_empty_batch_gives_an_empty_result(per_block):
    q, k, v, slot_k, slot_v = (x[:0] for x in make(11, 3, per_block, 1))
    assert attend_blocks(q, k, v, slot_k, slot_v, block=3, slots_per_block=per_block).shape == q.shape
