"""The projections that a trained model starts from: means of its real tokens, and such means with a learned correction.

Axes: b batch, h heads, s key positions, m real tokens, k slots, u slots in use, d channels.
"""

import torch
from torch import Tensor, nn

from linformers.checks import not_negative, one_of
from linformers.ops.linformer import multiply, multiply_ones
from linformers.ops.masks import blank, or_true
from linformers.ops.precision import single
from linformers.projections.base import Projection, Slots
from linformers.projections.dense import Dense
from linformers.projections.make import SHARINGS, make_projection
from linformers.projections.pooling import Mean

METHODS = ("mean", "learnable", "content")


class TokenMeans(Projection):
    """Each slot is the mean of consecutive real tokens; the first and the last one have a slot of their own.

    The m real tokens of an input are spread over the k slots, whatever the maximum length is. So an input with at most k of them is attended
    to exactly, and padding changes nothing. Trained encoders put much of their attention on the special tokens at both ends, which a
    mean with others would lose. With fewer than three slots the ends have no slots of their own.
    """

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        return token_means(x, keep, k)

    def beside(self, keys: Tensor, keep: Tensor | None) -> Tensor | None:
        return beside(keys, keep, self.k)

    def owners(self, length: int, keep: Tensor | None, k: int, device: torch.device) -> tuple[Tensor, int]:
        slot = slot_of(*ranks(keep, length, device), k)
        longest = self.max_len if torch.compiler.is_exporting() else length  # an export has one width for all lengths
        most = -(-longest // k) if k < 3 else max(1, -(-(longest - 2) // (k - 2)))
        return slot if keep is None else slot.masked_fill(~keep, -1), most


class CorrectedMean(Dense):
    """:class:`TokenMeans` plus a learned mixture of all real tokens: ``mean + C^T x``, where C begins at zero.

    C has a row for every position of the longest input. A shorter input is stretched over these rows, and its correction is multiplied by
    ``(m - k) / (max_len - k)``: an input with at most k real tokens gets none, and stays exact whatever C has learned.
    """

    def shorten(self, x: Tensor, keep: Tensor | None, part: int, k: int) -> Slots:
        mean, _, real, _ = token_means(x, keep, k)
        s, used = x.shape[2], mean.shape[2]
        exporting = torch.compiler.is_exporting()
        if self.max_len <= k or (keep is None and not exporting and s <= k):
            return Slots(mean, None, real)
        keep = or_true(keep, x) if exporting else keep
        rank, count = ranks(keep, s, x.device)  # (b or 1, s), (b or 1, 1)
        share = ((count - k) / (self.max_len - k)).clamp(0, 1) * self.max_len / count.clamp(min=1)
        share = share.to(x.dtype)[:, None]  # (b or 1, 1, 1)
        row = rank * self.max_len // count.clamp(min=1)  # of C; no two real tokens have the same
        matrix = self.matrix(part)[..., :k]  # (heads, max_len, k)
        if keep is None:
            matrix = matrix[:, row[0]]  # (heads, s, k)
            there = None
        else:
            row = row.masked_fill(~keep, self.max_len)
            x = gather_at(blank(x, keep[:, None]), row, self.max_len)  # (b, h, max_len, d)
            there = gather_at(keep[:, None, :, None].to(x.dtype), row, self.max_len)[:, 0, :, 0]  # (b, max_len)

        def mass() -> Tensor:
            return 1 + (share * multiply_ones(matrix, there))[..., :used]

        return Slots(mean + (share[..., None] * multiply(matrix, x))[:, :, :used], mass, real)

    def beside(self, keys: Tensor, keep: Tensor | None) -> Tensor | None:
        return beside(keys, keep, self.k)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def token_means(x: Tensor, keep: Tensor | None, k: int) -> Slots:
    """The slots of :class:`TokenMeans`.

    Args:
        x: ``(b, h, s, d)``.
        keep: ``(b, s)``, True where a token is real.
        k: the number of slots; only those that an input of this length can fill are returned.
    """
    s, wide = x.shape[2], single(x.dtype)  # in bfloat16, a sum of ones ends at 256
    used = k if torch.compiler.is_exporting() else min(s, k)  # an export has one number of slots for all lengths
    if keep is None and not torch.compiler.is_exporting():
        if s <= k:
            return Slots(x, None, None)
        slot = slot_of(*ranks(None, s, x.device), k)[0]
        size = torch.zeros(k, dtype=wide, device=x.device).index_add(
            0, slot, torch.ones(s, dtype=wide, device=x.device)
        )
        total = x.new_zeros(*x.shape[:2], k, x.shape[3], dtype=wide).index_add(2, slot, x.to(wide))
        return Slots((total / size[:, None]).to(x.dtype), None, None)
    keep = or_true(keep, x)
    slot = slot_of(*ranks(keep, s, x.device), k).masked_fill(~keep, used)
    size = gather_at(keep[:, None, :, None].to(wide), slot, used)  # (b, 1, u, 1)
    total = gather_at(blank(x, keep[:, None]).to(wide), slot, used)  # (b, h, u, d)
    return Slots((total / size.clamp(min=1)).to(x.dtype), None, size[:, 0, :, 0] > 0)


def beside(keys: Tensor, keep: Tensor | None, k: int) -> Tensor | None:
    """Which exact keys ``(b, h, s, d)`` are seen beside the slots: none of at most k real tokens, each of which has its own slot."""
    if keep is not None:
        return keep & (keep.sum(1, keepdim=True) > k)
    return None if keys.shape[2] > k else keys.new_zeros(len(keys), keys.shape[2], dtype=torch.bool)


def ranks(keep: Tensor | None, s: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rank of each token among the real ones, ``(b or 1, s)``, and their number, ``(b or 1, 1)``."""
    if keep is None:
        return torch.arange(s, device=device)[None], torch.full((1, 1), s, device=device)
    return keep.cumsum(1) - 1, keep.sum(1, keepdim=True)


def slot_of(rank: Tensor, count: Tensor, k: int) -> Tensor:
    """The slot of the real token of each rank, where there are ``count`` of them."""
    if k < 3:
        spread = ((rank + 1) * k - 1) // count.clamp(min=1)
    else:
        spread = (1 + (rank * (k - 2) - 1) // (count - 2).clamp(min=1)).clamp(min=1)
        spread = torch.where(rank == 0, 0, torch.where(rank == count - 1, k - 1, spread))
    return torch.where(count <= k, rank, spread)


def gather_at(x: Tensor, place: Tensor, places: int) -> Tensor:
    """Sum the vectors with the same place: ``(b, h, s, d)`` with ``(b, s)`` to ``(b, h, places, d)``; place ``places`` is dropped."""
    b, h, _, d = x.shape
    rows = (place + (places + 1) * torch.arange(b, device=x.device)[:, None]).flatten()
    flat = x.transpose(1, 2).flatten(2).flatten(0, 1)  # (b s, h d)
    sums = x.new_zeros(b * (places + 1), h * d).index_add(0, rows, flat)
    return sums.view(b, places + 1, h, d)[:, :places].transpose(1, 2)


def make_start(
    method: str,
    max_len: int,
    k: int,
    *,
    heads: int,
    sharing: str = "headwise",
    channels: int | None = None,
    block: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Projection:
    """The projection of one linearised attention.

    Args:
        method: ``"mean"``, with nothing to train; ``"learnable"`` (see :class:`CorrectedMean`); or ``"content"`` (see
            :class:`linformers.projections.Content`), which has to be trained.
        sharing: of the trained projections: ``"none"``, ``"headwise"`` or ``"kv"``.
        channels: of the features that tokens are assigned to content slots by.
        block: whether it is for the blocks of causal attention, which have no special tokens at their ends and one length.
    """
    one_of("sharing", sharing, SHARINGS[:3])
    one_of("method", method, METHODS)
    if method == "content":
        return make_projection(
            max_len, k, heads=heads, sharing=sharing, method=method, channels=channels, device=device, dtype=dtype
        )
    if method == "mean":
        return Mean(max_len, k) if block else TokenMeans(max_len, k)
    parts, own_heads = {"none": (2, heads), "headwise": (2, 1), "kv": (1, 1)}[sharing]
    return CorrectedMean(max_len, k, parts, own_heads, device=device, dtype=dtype)


def check_opening(open_slots: int, method: str) -> None:
    """Raise a ValueError unless the slots of ``method`` can be opened."""
    not_negative(open_slots=open_slots)
    if open_slots and method != "mean":
        slots = {"learnable": "mixtures of all tokens", "content": "weighted means of all tokens"}.get(
            method, "other slots"
        )
        raise ValueError(
            f"open_slots={open_slots} needs slots that are means of disjoint tokens, and those of method={method!r} are {slots}; "
            "use method='mean', or open_slots=0"
        )


def exact_keys(
    projection: Projection, max_len: int, open_slots: int, local_window: int = 0, causal_block: int = 0
) -> int:
    """The most exact keys that a query of the longest input sees.

    Args:
        projection: the projection whose slots are opened.
        local_window: positions of a block of exact neighbours; a segment that touches them is opened with all its keys.
        causal_block: positions of a block of block-causal attention.
    """
    found = projection.owners(projection.max_len, None, projection.k, torch.device("cpu"))
    if found is None:
        return 0
    tokens = found[0].flatten().bincount().repeat(max_len // projection.max_len)  # of every slot
    opened = int(tokens.sort(descending=True).values[:open_slots].sum())
    touching = 2 * (int(tokens.max()) - 1) if local_window else 0
    return min(max_len, 2 * causal_block + 3 * local_window + touching + opened)
