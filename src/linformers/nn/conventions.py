"""torch's conventions of ``nn.MultiheadAttention``, checked and turned into this package's.

Axes: b batch, n query positions, s key positions, d channels.
"""

import torch
from torch import Tensor

from linformers.ops.masks import readable


def check_shapes(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], batch: int) -> None:
    """Raise a ValueError unless the shapes of query, key and value agree, with ``widths`` channels and the batch on axis ``batch``."""
    q, k, v = query.shape, key.shape, value.shape
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


def keep_of(mask: Tensor | None, key: Tensor, batched: bool) -> Tensor | None:
    """torch's ``key_padding_mask`` of keys ``(b, s, d)`` as ``(b, s)``, True where the key is real; a ValueError for any other mask."""
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
                f"a float key_padding_mask may hold 0 (use) and -inf (ignore); got {mask[between][0].item():g}, but keys "
                "cannot be weighted individually: a slot mixes several"
            )
    return keep if batched else keep[None]
