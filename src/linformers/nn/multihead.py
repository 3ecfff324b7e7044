"""``LinearMultiheadAttention``: ``torch.nn.MultiheadAttention`` with a cost that is linear in the sequence length.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, d channels. The layer has torch's conventions
(``key_padding_mask`` is True where a key is ignored) and converts them into ``keep``.
"""

from typing import Any

import torch
from torch import Tensor

from linformers.checks import at_least_one, flag, given, not_negative, one_of, share, whole
from linformers.limits import SIZE, at_most
from linformers.nn.conventions import check_shapes, keep_of
from linformers.nn.core import Attended, How, Maps, attend_heads, attend_to_memory, attend_to_slots, look_up
from linformers.nn.memory import Opens, make_memory, memory_of_heads, with_exact
from linformers.nn.mismatch import explained
from linformers.nn.torch_maps import TorchMaps
from linformers.ops.blocks import block_sizes, content_block
from linformers.ops.heads import join_heads, to_heads
from linformers.ops.masks import align_left, blank, check_causal_mask, take
from linformers.ops.span import refuse
from linformers.ops.views import all_slots, reordered
from linformers.projections.base import NO_LIMIT, Projection, check_factory, check_length
from linformers.projections.content import Content
from linformers.projections.make import SHARINGS, Method, make_projection


class Default(int):
    """A default value, distinct from the same number given by the caller: only the latter can contradict a projection that is passed in."""


class LinearMultiheadAttention(TorchMaps):
    """Multi-head attention to k slots instead of s keys (Linformer, Wang et al. 2020).

    It takes the arguments of :class:`torch.nn.MultiheadAttention` and the following ones, and its state dict is that of
    ``nn.MultiheadAttention`` plus the projections; ``load_state_dict(..., strict=False)`` takes over a trained one.

    Args:
        embed_dim: channels of queries and outputs.
        num_heads: attention heads; divides ``embed_dim``.
        dropout: probability of dropping an attention weight.
        bias: whether the maps of inputs and outputs have a bias.
        add_bias_kv: append a learned key and value, after the projection.
        add_zero_attn: append a zero key and value, after the projection.
        kdim: channels of the keys; None means ``embed_dim``.
        vdim: channels of the values; None means ``embed_dim``.
        batch_first: inputs and outputs are ``(b, n, d)`` instead of ``(n, b, d)``.
        seq_len: the longest key sequence. Shorter ones need no padding. None for any: the default of ``method="content"``.
        proj_k: the number of slots k.
        param_sharing: ``"none"``, each head has its own E and F; ``"headwise"``, the heads share them; ``"kv"``, E and F
            are one matrix; ``"layerwise"``, the same, to be passed to further layers as ``projection``.
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"``, ``"no_params"``, ``"content"``; or a matrix, a module, or a
            pair of either, for keys and values (see :func:`linformers.make_projection`). The layer owns the result.
        projection: use this projection, which another module owns: it is neither registered nor copied here. Its own length and
            slots are used; leave ``seq_len`` and ``proj_k`` out (for a causal layer it has the length of a block, and ``seq_len`` may be given).
        start: initial values of learned projections, ``"random"`` or ``"segments"``.
        causal: self-attention in which no output depends on a later input. Each block of positions is projected separately
            (see :mod:`linformers.nn.state`); a ``projection`` that is passed in is the one of a block.
        block_size: positions of such a block; None chooses one.
        num_kv_heads: key/value heads, each for ``num_heads / num_kv_heads`` neighbouring query heads (grouped-query attention); None
            means ``num_heads``. Fewer have maps of their own, ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``, as with
            ``kdim``; ``in_proj_bias`` then holds ``embed_dim`` numbers for the queries, and ``num_kv_heads * head_dim`` each for
            keys and for values, in that order. With ``param_sharing="none"`` each key/value head has its own E and F.
        local_window: in self-attention, also see the exact keys of the query's own and the neighbouring blocks of this many positions.
        open_slots: each query replaces this many of its best slots by the exact keys they stand for; with ``method="mean"``.
        open_reach: in a causal layer, how many positions back slots can be opened; None for all.

    Example:
        >>> import torch
        >>> from linformers import LinearMultiheadAttention
        >>> attention = LinearMultiheadAttention(64, 8, seq_len=512, proj_k=128, batch_first=True)
        >>> x = torch.randn(2, 300, 64)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 300, 64]), torch.Size([2, 300, 128]))
    """

    # Defaults for layers that were pickled before these options existed.
    local_window = 0
    opens: Opens | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        seq_len: int | None = Default(512),
        proj_k: int = Default(128),
        param_sharing: str = "none",
        method: Method = "learnable",
        projection: Projection | Method | None = None,
        start: str = "random",
        causal: bool = False,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
        local_window: int = 0,
        open_slots: int = 0,
        open_reach: int | None = None,
    ) -> None:
        flag(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first, causal=causal)
        whole(seq_len=seq_len, block_size=block_size)
        at_least_one(seq_len=seq_len)
        given(proj_k=proj_k, local_window=local_window, open_slots=open_slots, dropout=dropout)
        whole(proj_k=proj_k, local_window=local_window, open_slots=open_slots, open_reach=open_reach)
        at_least_one(proj_k=proj_k)
        sizes = {"seq_len": seq_len, "proj_k": proj_k, "block_size": block_size, "local_window": local_window}
        for which, number in sizes.items():
            at_most(which, number, SIZE)
        one_of("param_sharing", param_sharing, SHARINGS)
        share(dropout=dropout)
        check_factory(device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        extra_keys: dict[str, Any] = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        super().__init__(embed_dim, num_heads, num_kv_heads, kdim, vdim, bias=bias, **extra_keys, **factory)
        groups = self.num_kv_heads
        if block_size is not None and not causal:
            raise ValueError(f"block_size={block_size} has no meaning with causal=False")
        for name, value in (("causal", causal), ("local_window", local_window)):
            if value and (add_bias_kv or add_zero_attn):
                extra = "add_bias_kv" if add_bias_kv else "add_zero_attn"
                raise ValueError(f"{extra}=True cannot be combined with {name}={value}")
        for name, choice, default in (("method", method, "learnable"), ("start", start, "random")):
            if projection is not None and not (isinstance(choice, str) and choice == default):
                raise ValueError(f"{name} has no meaning beside projection, which is used as it is; leave {name} out")
        not_negative(local_window=local_window, open_slots=open_slots)
        at_least_one(open_reach=open_reach)
        if open_reach is not None and not open_slots:
            raise ValueError(f"open_reach={open_reach} has no meaning without open_slots")
        if open_reach is not None and not causal:
            raise ValueError(f"open_reach={open_reach} has no meaning with causal=False")
        if causal and local_window:
            raise ValueError(f"local_window={local_window} cannot be combined with causal=True; use block_size")
        self.dropout, self.batch_first = dropout, batch_first
        self.param_sharing, self.local_window = param_sharing, local_window
        self.opens = Opens(open_slots, open_reach) if open_slots else None

        # What one projection shortens: the whole sequence, or a block of it.
        length, slots = None if seq_len is None else int(seq_len), int(proj_k)
        content = isinstance(projection, Content) or (projection is None and method == "content")
        if content and isinstance(seq_len, Default):
            length = None
        longest, block = length, None
        if causal and content:
            block = content_block(projection.k if isinstance(projection, Content) else slots, block_size)
        elif causal and projection is None and length is not None:
            length, slots = block_sizes(length, slots, block_size)
        made = make_projection(
            length,
            slots,
            heads=groups,
            sharing=param_sharing,
            method=method if projection is None else projection,
            start=start,
            channels=self.kdim,
            **factory,
        )
        if made.heads not in (1, groups):
            name = "num_heads" if groups == num_heads else "num_kv_heads"
            raise ValueError(f"the projection has {made.heads} heads; this layer has {name}={groups}")
        self.causal = causal
        if causal:
            self.block_size = made.max_len if block is None else block
            if block_size not in (None, self.block_size):
                raise ValueError(f"block_size={block_size}, but the projection has blocks of {made.max_len}")
            self._causal_len = longest
        if open_slots and made.owners(1, None, 1, torch.device("cpu")) is None:
            raise ValueError(
                f"open_slots={open_slots} needs slots that are means of segments, and those of {type(made).__name__} are not; use method='mean'"
            )
        if projection is None:
            self.projection = made
        else:
            object.__setattr__(self, "projection", made)  # bypasses nn.Module, which would register it
        for name, asked, own in (("seq_len", seq_len, self.seq_len), ("proj_k", proj_k, self.proj_k)):
            if asked != own and not isinstance(asked, Default):
                raise ValueError(f"{name}={asked}, but the given projection has {own}; leave {name} out")
        self.reset_maps()

    @property
    def seq_len(self) -> int | None:
        """The longest key sequence; None for any."""
        longest = self._causal_len if self.causal else self.projection.max_len
        return None if longest == NO_LIMIT else longest

    @property
    def proj_k(self) -> int:
        """The number of slots of the longest sequence."""
        if not self.causal or self._causal_len is None or self._content:
            return self.projection.k
        return self._causal_len * self.projection.k // self.projection.max_len

    def reset_parameters(self) -> None:
        """Draw all parameters again, also those of the projection if the layer owns it."""
        self.reset_maps()
        if "projection" in dict(self.named_children()):
            self.projection.reset_parameters()

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``seq_len`` or ``proj_k`` in place; see :func:`linformers.resample`."""
        if "projection" not in dict(self.named_children()):
            raise ValueError("this layer does not own its projection; resample the module that does")
        if not self.causal:
            self.projection.resample_(max_len, k, noise)
            return
        length = max_len or self.seq_len
        if self._content:
            self.projection.resample_(max_len, k, noise)
        elif k is not None and length is not None:
            self.projection.resample_(k=block_sizes(length, k, self.block_size)[1], noise=noise)
        self._causal_len = length

    @property
    def _content(self) -> bool:
        return isinstance(self.projection, Content)

    @explained("query", "key", "value", masks=("key_padding_mask", "attn_mask"))
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``query`` to ``key`` and ``value``.

        Args:
            query: ``(n, b, embed_dim)``, ``(b, n, embed_dim)`` with ``batch_first``, or ``(n, embed_dim)``.
            key: the same with ``s`` positions and ``kdim`` channels.
            value: the same with ``s`` positions and ``vdim`` channels.
            key_padding_mask: ``(b, s)`` or ``(s,)``: True where a key is ignored; or a float mask of 0 (use) and
                -inf (ignore).
            need_weights: also return the weights. False is faster.
            attn_mask: has no meaning here, because a slot mixes all positions; must be None. A causal layer takes the
                standard causal mask, and needs none.
            average_attn_weights: return the weights averaged over the heads.
            is_causal: must be False, for the same reason, unless the layer is causal.

        Returns:
            The output, in the shape of ``query``; and the weights, ``(b, n, k)`` or ``(b, h, n, k)`` (without ``b`` if there is
            no batch), or None. With ``add_bias_kv`` and ``add_zero_attn`` they have one more column each. Those of a causal layer
            are for its slots, then for the previous and the own block: ``(b, n, k + 2 c)``; with ``local_window`` also for the next one,
            ``(b, n, k + 3 c)``. A slot that a query opened has one column, the sum of the weights of its keys.

        Raises:
            ValueError: for shapes that do not agree, keys longer than ``seq_len``, and masks that cannot be applied to slots.
        """
        refuse("LinearMultiheadAttention")
        if not self.causal and (attn_mask is not None or is_causal):
            raise ValueError(
                f"{'attn_mask' if attn_mask is not None else 'is_causal=True'} has no meaning for a Linformer projection: each "
                f"of its {self.proj_k} slots mixes all positions. To ignore padding use key_padding_mask; for causal "
                "attention build the layer with causal=True"
            )
        if attn_mask is not None:
            check_causal_mask(attn_mask, query.shape[-2] if self.batch_first or query.dim() == 2 else query.shape[0])
        if query.is_nested:
            if key_padding_mask is not None:
                raise ValueError("a nested tensor has no padding; leave key_padding_mask out")
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)

        widths = self.embed_dim, self.kdim, self.vdim
        check_shapes(query, key, value, widths, 0 if self.batch_first else 1)
        batched, own, same = query.dim() == 3, query is key, key is value
        if not batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        key = query if own else key
        value = key if same else value
        keep = keep_of(key_padding_mask, key, batched)

        output, weights = (self._attend_causally if self.causal else self._attend)(
            query, key, value, keep, need_weights
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, need_weights: bool) -> Attended:
        """The batch-first core: ``(b, n, d)`` and weights ``(b, h, n, k)``."""
        maps, how = self._maps(), self._how(need_weights)
        if self.local_window or self.opens is not None:
            return self._attend_exactly(query, key, value, keep, how)
        extra = self.bias_k is not None or self.add_zero_attn
        heads, groups = self.num_heads, self.num_kv_heads
        if query is key is value and not extra:
            return attend_to_slots(query, maps, self.projection, heads=heads, kv_heads=groups, keep=keep, how=how)
        memory = make_memory(key, value, maps.key, maps.value, self.projection, heads=groups, keep=keep)
        views = all_slots(memory.keys.shape[2], self.proj_k) if need_weights else ()  # before the extra keys
        how = how._replace(columns=None, views=views)
        return attend_to_memory(query, self.append_extra(memory), maps, heads=heads, how=how)

    def _attend_causally(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, need_weights: bool
    ) -> Attended:
        """The batch-first core of a causal layer: ``(b, n, d)`` and weights ``(b, h, n, k + 2 c)``."""
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"causal attention is self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys"
            )
        check_length(key.shape[1], self.seq_len or NO_LIMIT)
        undo = None
        if keep is not None:
            _, moved, undo = align_left(keep, keep)
            if undo is not None:  # rows begin with their first real token, so that left padding is exact
                query, key, value = (align_left(x, keep)[0] for x in (query, key, value))
            keep = moved
            key, value = blank(key, keep), blank(value, keep)
        maps, how = self._maps(), self._how(need_weights)._replace(views=() if undo is None else (reordered(undo, 2),))
        q = to_heads(maps.query(query), self.num_heads)
        k, v = (to_heads(to(x), self.num_kv_heads) for to, x in ((maps.key, key), (maps.value, value)))
        seen: dict[str, Any] = {"block": self.block_size, "features": key, "opens": self.opens}
        out, weights = attend_heads(q, k, v, self.projection, keep=keep, causal=True, **seen, how=how)
        return self.out_proj(join_heads(out if undo is None else take(out, undo, 2))), weights

    def _how(self, need_weights: bool) -> How:
        return How(self.dropout if self.training else 0.0, need_weights, self.proj_k)

    def _maps(self) -> Maps:
        return Maps(*self.channel_maps(), self.out_proj)

    def _attend_exactly(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, how: How) -> Attended:
        """:meth:`_attend` with exact keys beside the slots: those of a window, or of opened slots."""
        if self.local_window and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"exact neighbours are for self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys"
            )
        check_length(key.shape[1], self.projection.max_len)
        q, k, v = (
            to_heads(to(x), heads)
            for to, x, heads in zip(
                self.channel_maps(),
                (query, blank(key, keep), blank(value, keep)),
                (self.num_heads, self.num_kv_heads, self.num_kv_heads),
                strict=True,
            )
        )
        if keep is not None:
            k, v = (blank(x, keep[:, None]) for x in (k, v))
        if self.local_window or self.opens is None:
            seen: dict[str, Any] = {"block": self.local_window, "features": key, "opens": self.opens}
            out, weights = attend_heads(q, k, v, self.projection, keep=keep, **seen, how=how)
        else:
            memory = memory_of_heads(k, v, self.projection, keep, None, key)
            memory = self.append_extra(with_exact(memory, k, v, self.projection, self.opens, keep=keep))
            out, weights = look_up(q, memory, None, how)
        return self.out_proj(join_heads(out)), weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of nested tensors, which ``nn.TransformerEncoder`` makes of padded batches in eval mode."""
        if query is not key or key is not value:
            raise ValueError("nested tensors are supported for self-attention only; pad them and pass key_padding_mask")
        lengths = torch.tensor([len(x) for x in query.unbind()], device=query.device)
        padded = query.to_padded_tensor(0.0)
        keep = torch.arange(padded.shape[1], device=query.device) < lengths[:, None]
        attend = self._attend_causally if self.causal else self._attend
        output, weights = attend(padded, padded, padded, keep, need_weights)
        rows = [x[:length] for x, length in zip(output, lengths.tolist(), strict=True)]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights

    def extra_repr(self) -> str:
        own = "" if "projection" in dict(self.named_children()) else ", projection=shared"
        groups = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{groups}, seq_len={self.seq_len}, proj_k={self.proj_k}, "
            f"param_sharing={self.param_sharing!r}, dropout={self.dropout}, batch_first={self.batch_first}, causal={self.causal}{own}"
        )
