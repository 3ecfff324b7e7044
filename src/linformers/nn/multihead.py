"""``LinearMultiheadAttention``: ``torch.nn.MultiheadAttention`` with a cost that is linear in the sequence length.

Axes: b batch, h heads, g key/value heads, n query positions, s key positions, k slots, d channels. The layer speaks torch's conventions
(``key_padding_mask`` is True where a key is to be ignored) and turns them into ``keep`` at its door.
"""

from typing import Any

import torch
from torch import Tensor, nn

from linformers.nn.core import Attended, How, Maps, attend_heads, attend_to_memory, attend_to_slots
from linformers.nn.maps import Affine
from linformers.nn.memory import Memory, make_memory
from linformers.ops.blocks import block_sizes
from linformers.ops.heads import join_heads, to_heads
from linformers.ops.masks import align_left, blank, check_causal_mask, readable, take
from linformers.ops.views import all_slots, reordered
from linformers.projections.base import Projection, check_length
from linformers.projections.make import Method, make_projection


class Unsaid(int):
    """A default that differs from the same number said: only what was said can contradict a projection that is handed in."""


class LinearMultiheadAttention(nn.Module):
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
        seq_len: the longest key sequence. Shorter ones need no padding.
        proj_k: the number of slots k.
        param_sharing: ``"none"``, each head has its own E and F; ``"headwise"``, the heads share them; ``"kv"``, E and F
            are one matrix; ``"layerwise"``, the same, to be handed to further layers as ``projection``.
        method: ``"learnable"``, ``"convolution"``, ``"mean"``, ``"max"``, ``"no_params"``; or a matrix, a module, or a pair
            of either, for keys and values (see :func:`linformers.make_projection`). The layer owns what it makes of it.
        projection: use this projection, which another module owns: it is neither registered nor copied here. Its own length and
            slots hold; leave ``seq_len`` and ``proj_k`` out (that of a causal layer has the length of a block, and ``seq_len`` is free).
        start: ``"random"`` or ``"segments"``, how learned projections begin.
        causal: self-attention in which no output depends on a later input. Then blocks of positions are projected, each on
            its own (see :mod:`linformers.nn.state`), and so is a ``projection`` that is handed in.
        block_size: positions of such a block; None picks one.
        num_kv_heads: key/value heads, each for ``num_heads / num_kv_heads`` neighbouring query heads (grouped-query attention); None
            means ``num_heads``. Fewer have maps of their own, ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``, as with
            ``kdim``; ``in_proj_bias`` then holds ``embed_dim`` numbers for the queries, and ``num_kv_heads * head_dim`` each for
            keys and for values, in that order. With ``param_sharing="none"`` each key/value head has its own E and F.

    Example:
        >>> import torch
        >>> from linformers import LinearMultiheadAttention
        >>> attention = LinearMultiheadAttention(64, 8, seq_len=512, proj_k=128, batch_first=True)
        >>> x = torch.randn(2, 300, 64)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 300, 64]), torch.Size([2, 300, 128]))
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    # torch's fused encoder path reads ``in_proj_weight`` and runs full attention with it. It asks for this flag first; the
    # answer has to be no, so that this layer's own forward runs.
    _qkv_same_embed_dim = False

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
        seq_len: int = Unsaid(512),
        proj_k: int = Unsaid(128),
        param_sharing: str = "none",
        method: Method = "learnable",
        projection: Projection | Method | None = None,
        start: str = "random",
        causal: bool = False,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a positive multiple of num_heads, got embed_dim={embed_dim} and num_heads={num_heads}"
            )
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if groups < 1 or num_heads % groups:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got num_kv_heads={num_kv_heads}")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        if block_size is not None and not causal:
            raise ValueError(f"block_size={block_size} has no meaning with causal=False")
        if causal and (add_bias_kv or add_zero_attn):
            raise ValueError(f"{'add_bias_kv' if add_bias_kv else 'add_zero_attn'}=True does not go with causal=True")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.param_sharing = param_sharing

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        packed, width = self.kdim == self.vdim == embed_dim and groups == num_heads, groups * self.head_dim
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (width, self.kdim),
            "v_proj_weight": None if packed else (width, self.vdim),
            "in_proj_bias": (embed_dim + 2 * width,) if bias else None,
            "bias_k": (1, 1, width) if add_bias_kv else None,
            "bias_v": (1, 1, width) if add_bias_kv else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

        # What one projection shortens: the whole sequence, or a block of it.
        length, slots = int(seq_len), int(proj_k)
        if causal and projection is None:
            length, slots = block_sizes(length, slots, block_size)
        made = make_projection(
            length,
            slots,
            heads=groups,
            sharing=param_sharing,
            method=method if projection is None else projection,
            start=start,
            **factory,
        )
        if made.heads not in (1, groups):
            name = "num_heads" if groups == num_heads else "num_kv_heads"
            raise ValueError(f"the projection has {made.heads} heads; this layer has {name}={groups}")
        self.causal = causal
        if causal:
            if block_size not in (None, made.max_len):
                raise ValueError(f"block_size={block_size}, but the projection has blocks of {made.max_len}")
            self._causal_len = int(seq_len)
        if projection is None:
            self.projection = made
        else:
            object.__setattr__(self, "projection", made)  # around nn.Module, which would register it
        for name, given, own in (("seq_len", seq_len, self.seq_len), ("proj_k", proj_k, self.proj_k)):
            if given != own and not isinstance(given, Unsaid):
                raise ValueError(f"{name}={given}, but the projection handed in has {own}; leave {name} out")
        self._reset_own_parameters()

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_heads if self.in_proj_weight is not None else len(self.k_proj_weight) // self.head_dim

    @property
    def seq_len(self) -> int:
        """The longest key sequence."""
        return self._causal_len if self.causal else self.projection.max_len

    @property
    def proj_k(self) -> int:
        """The number of slots of the longest sequence."""
        return self._causal_len * self.projection.k // self.projection.max_len if self.causal else self.projection.k

    def reset_parameters(self) -> None:
        """Draw all parameters anew, also those of the projection if the layer owns it."""
        self._reset_own_parameters()
        if "projection" in self._modules:
            self.projection.reset_parameters()

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``seq_len`` or ``proj_k`` in place; see :func:`linformers.resample`."""
        if "projection" not in self._modules:
            raise ValueError("this layer was handed its projection; resample the module that owns it")
        if not self.causal:
            self.projection.resample_(max_len, k, noise)
            return
        length, block = max_len or self.seq_len, self.projection.max_len
        if k is not None:
            self.projection.resample_(k=block_sizes(length, k, block)[1], noise=noise)
        self._causal_len = length

    def _reset_own_parameters(self) -> None:
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (weight := getattr(self, name)) is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        self.out_proj.reset_parameters()
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        for name in ("bias_k", "bias_v"):
            if (extra := getattr(self, name)) is not None:
                nn.init.xavier_normal_(extra)

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
        """Attend.

        Args:
            query: ``(n, b, embed_dim)``, ``(b, n, embed_dim)`` with ``batch_first``, or ``(n, embed_dim)``.
            key: the same with ``s`` positions and ``kdim`` channels.
            value: the same with ``s`` positions and ``vdim`` channels.
            key_padding_mask: ``(b, s)`` or ``(s,)``: True where a key is to be ignored; or a float mask of 0 (use) and
                -inf (ignore).
            need_weights: also return the weights. False is faster.
            attn_mask: has no meaning here, because a slot mixes all positions; must be None. A causal layer takes the
                standard causal mask, and needs none.
            average_attn_weights: return the weights averaged over the heads.
            is_causal: must be False, for the same reason, unless the layer is causal.

        Returns:
            The output, in the shape of ``query``; and the weights, ``(b, n, k)`` or ``(b, h, n, k)`` (without ``b`` if there is
            no batch), or None. With ``add_bias_kv`` and ``add_zero_attn`` they have one more column each. Those of a causal layer
            are for its slots, then for the previous and the own block: ``(b, n, k + 2 c)``.

        Raises:
            ValueError: for shapes that do not fit, keys longer than ``seq_len``, and masks without a meaning.
        """
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

        self._check_shapes(query, key, value)
        batched, own, same = query.dim() == 3, query is key, key is value
        if not batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        key = query if own else key
        value = key if same else value
        keep = self._keep(key_padding_mask, key, batched)

        attend = self._attend_causally if self.causal else self._attend
        output, weights = attend(query, key, value, keep, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, need_weights: bool) -> Attended:
        """The batch-first core: ``(b, n, d)`` and weights ``(b, h, n, k)``."""
        maps, how = self._maps(), self._how(need_weights)
        extra = self.bias_k is not None or self.add_zero_attn
        heads, groups = self.num_heads, self.num_kv_heads
        if query is key is value and not extra:
            return attend_to_slots(query, maps, self.projection, heads=heads, kv_heads=groups, keep=keep, how=how)
        memory = make_memory(key, value, maps.key, maps.value, self.projection, heads=groups, keep=keep)
        views = all_slots(memory.keys.shape[2], self.proj_k) if need_weights else ()  # before the extra keys
        how = how._replace(columns=None, views=views)
        return attend_to_memory(query, self._append_extra(memory), maps, heads=heads, how=how)

    def _attend_causally(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, need_weights: bool
    ) -> Attended:
        """The batch-first core of a causal layer: ``(b, n, d)`` and weights ``(b, h, n, k + 2 c)``."""
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"causal attention is self-attention, but there are {query.shape[1]} queries and {key.shape[1]} keys"
            )
        check_length(key.shape[1], self.seq_len)
        undo = None
        if keep is not None:
            _, moved, undo = align_left(keep, keep)
            if undo is not None:  # rows begin with their first real token, so that left padding is exact
                query, key, value = (align_left(x, keep)[0] for x in (query, key, value))
            keep = moved
            key, value = blank(key, keep), blank(value, keep)
        maps = self._maps()
        q = to_heads(maps.query(query), self.num_heads)
        k, v = (to_heads(to(x), self.num_kv_heads) for to, x in ((maps.key, key), (maps.value, value)))
        how = self._how(need_weights)._replace(views=() if undo is None else (reordered(undo, 2),))
        block = self.projection.max_len
        out, weights = attend_heads(q, k, v, self.projection, keep=keep, block=block, causal=True, how=how)
        return self.out_proj(join_heads(out if undo is None else take(out, undo, 2))), weights

    def _how(self, need_weights: bool) -> How:
        return How(self.dropout if self.training else 0.0, need_weights, self.proj_k)

    def _maps(self) -> Maps:
        return Maps(*self._channel_maps(), self.out_proj)

    def _channel_maps(self) -> tuple[Affine, Affine, Affine]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        sizes = [len(weight) for weight in weights]
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        q, k, v = (Affine(weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return q, k, v

    def _append_extra(self, memory: Memory) -> Memory:
        """Append the learned and the zero key and value, which always take part."""
        k, v, keep = memory
        b, g, slots, d = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.view(1, g, 1, d).expand(b, -1, -1, -1).to(k.dtype)], 2)
            v = torch.cat([v, self.bias_v.view(1, g, 1, d).expand(b, -1, -1, -1).to(v.dtype)], 2)
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(b, g, 1, d)], 2) for x in (k, v))
        if keep is not None:
            keep = torch.cat([keep, keep.new_ones(b, k.shape[2] - slots)], 1)
        return Memory(k, v, keep)

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Ragged batches, which ``nn.TransformerEncoder`` makes of padded ones in eval mode."""
        if query is not key or key is not value:
            raise ValueError("nested tensors are taken for self-attention only; pad them and pass key_padding_mask")
        lengths = torch.tensor([len(x) for x in query.unbind()], device=query.device)
        padded = query.to_padded_tensor(0.0)
        keep = torch.arange(padded.shape[1], device=query.device) < lengths[:, None]
        attend = self._attend_causally if self.causal else self._attend
        output, weights = attend(padded, padded, padded, keep, need_weights)
        rows = [x[:length] for x, length in zip(output, lengths.tolist(), strict=True)]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        q, k, v = query.shape, key.shape, value.shape
        batch, widths = 0 if self.batch_first else 1, (self.embed_dim, self.kdim, self.vdim)
        if len(q) not in (2, 3) or not len(q) == len(k) == len(v):
            wrong = "query, key and value must all have 3 axes, or 2 without a batch"
        elif (q[-1], k[-1], v[-1]) != widths:
            wrong = f"this layer takes embed_dim={widths[0]}, kdim={widths[1]}, vdim={widths[2]}"
        elif k[:-1] != v[:-1]:
            wrong = "key and value must have the same batch and length"
        elif len(q) == 3 and q[batch] != k[batch]:
            wrong = f"query and key must have the same batch size (axis {batch})"
        else:
            return
        raise ValueError(f"{wrong}; got query {tuple(q)}, key {tuple(k)}, value {tuple(v)}")

    def _keep(self, mask: Tensor | None, key: Tensor, batched: bool) -> Tensor | None:
        """torch's padding mask as ``(b, s)``, True where the key is real."""
        if mask is None:
            return None
        expected = tuple(key.shape[:2]) if batched else (key.shape[1],)
        if tuple(mask.shape) != expected:
            raise ValueError(f"key_padding_mask must be {expected}, got {tuple(mask.shape)}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"key_padding_mask must be bool (True = ignore) or float (0 and -inf), got {mask.dtype}")
        keep = ~mask if mask.dtype == torch.bool else mask == 0
        if mask.is_floating_point() and readable(mask):
            between = ~keep & ~(mask <= torch.finfo(mask.dtype).min)
            if between.any():
                raise ValueError(
                    f"a float key_padding_mask may hold 0 (use) and -inf (ignore); got {mask[between][0].item():g}, and a key "
                    "cannot be weighed: its slot mixes it with others"
                )
        return keep if batched else keep[None]

    def extra_repr(self) -> str:
        own = "" if "projection" in self._modules else ", projection=handed in"
        groups = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{groups}, seq_len={self.seq_len}, proj_k={self.proj_k}, "
            f"param_sharing={self.param_sharing!r}, dropout={self.dropout}, batch_first={self.batch_first}, causal={self.causal}{own}"
        )
