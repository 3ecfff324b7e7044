"""Positions to segments, and their frames."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linformers.ops.segments import frame_positions, segment_frames, segment_membership, used_segments


@given(max_len=st.integers(1, 40), k=st.integers(1, 45), data=st.data())
def test_frames_begin_at_their_segments(max_len, k, data):
    s = data.draw(st.integers(1, max_len), "s")
    starts, width = [math.floor(j * max_len / k) for j in range(k)], math.ceil(max_len / k)
    ends = [*starts[1:], max_len]
    used = used_segments(s, max_len, k)
    assert used == sum(start < s for start in starts)
    x = torch.arange(1, 2 * s + 1).view(1, s, 2)
    frames = segment_frames(x, max_len, k)
    member = segment_membership(s, max_len, k, x.device)
    assert frames.shape == (1, used, width, 2)
    assert member.shape == (used, width)
    positions = frame_positions(max_len, k, used, x.device)
    for j in range(used):
        for t in range(width):
            i = starts[j] + t
            assert positions[j, t] == i
            assert torch.equal(frames[0, j, t], x[0, i] if i < s else torch.zeros(2, dtype=x.dtype))
            assert bool(member[j, t]) == (i < min(ends[j], s))


@pytest.mark.parametrize(("max_len", "k"), [(12, 4), (13, 5)])
def test_frames_of_masks_are_false_past_the_end(max_len, k):
    keep = torch.ones(2, 10, dtype=torch.bool)
    frames = segment_frames(keep, max_len, k)
    assert frames.dtype == torch.bool
    assert torch.equal(frames, frame_positions(max_len, k, frames.shape[1], keep.device).lt(10).expand(2, -1, -1))
