"""``LinformerCache``: the constant-size decoding state of a causal model, as transformers' cache.

Axes: b batch, g key/value heads, n the longest input, m its blocks, c positions and r slots of a block, d channels of a head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from linformers.nn.state import DecodingState, LayerState


class LinformerCacheLayer:
    """The state of one layer, with the attributes ``keys`` and ``values`` of transformers' cache layers."""

    is_compileable = is_sliding = False

    def __init__(self, state: LayerState) -> None:
        self.state = state

    @property
    def keys(self) -> Tensor | None:
        """Slots, then the exact keys of two blocks; zero where the last token sees none.

        ``(b, g, (m - 2) r + 2 c, d)``, for the m blocks of the longest input: its last two have no slots yet. Content slots are k at any
        length: ``(b, g, k + 2 c, d)``. With ``open_slots`` the exact keys are those of all n positions, or of ``open_reach`` (at least 2 c).
        Full attention has exact keys only, ``(b, g, n, d)``.
        """
        return None if self.state.attention is None else self.state.attention.stored()[0]

    @property
    def values(self) -> Tensor | None:
        """The values of :attr:`keys`, in the same shape."""
        return None if self.state.attention is None else self.state.attention.stored()[1]


class LinformerCache(Cache):
    """The ``past_key_values`` of these models: slots and two blocks of exact keys for each layer, whatever the length; with ``open_slots``
    also the exact keys that can be opened.

    Args:
        state: None until the model has read the first tokens.
    """

    def __init__(self, state: DecodingState | None = None) -> None:
        super().__init__(layers=[])
        self.start(state)

    def start(self, state: DecodingState | None) -> None:
        """Replace the state, and count positions from 0 again."""
        if state is not None and not isinstance(state, DecodingState):
            raise TypeError(f"state must be the result of new_state, or None, got {type(state).__name__}")
        self.state = state
        self.layers: list[Any] = [] if state is None else [LinformerCacheLayer(layer) for layer in state.layers]
        self.positions = 0  # padding included: what transformers means by a sequence length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions the cache has read, padding included; the same for every layer."""
        return self.positions

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Always -1: the model limits the length, not the cache."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The length of the mask for a pass over ``query_length`` more positions, and its offset."""
        return self.positions + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or drop rows: row i becomes what row ``beam_idx[i]`` was."""
        if self.state is not None:
            self.state.reorder(beam_idx.to(self.state.length.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same as :meth:`reorder_cache`, under transformers' other name for it."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.length.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise a ValueError: a compressed block cannot be decompressed."""
        raise ValueError(
            f"cannot remove {tokens_to_remove} tokens: finished blocks are compressed irreversibly; start with a new cache"
        )

    def reset(self) -> None:
        """Remove all that was read."""
        self.start(None)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise a TypeError: only the layers of a Linformer write keys and values."""
        raise TypeError("a LinformerCache belongs to the models of linformers.hf; other models cannot write to it")

    def __repr__(self) -> str:
        return f"LinformerCache(layers={len(self)}, positions={self.positions})"

    @property
    def batch_size(self) -> int:
        """The number of rows, or -1 if nothing has been read yet."""
        return -1 if self.state is None else len(self.state.length)

    @property
    def is_compileable(self) -> bool:
        """Always False: rows finish their blocks at different steps."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """Always False; see :meth:`crop`."""
        return False
