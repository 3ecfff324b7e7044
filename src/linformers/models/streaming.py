"""``stream``: inference over inputs that need not fit into memory.

Axes: b batch, n positions, c positions of a chunk, ch channels.
"""

from collections.abc import Iterable
from itertools import chain

import numpy
import torch
from torch import Tensor

from linformers import checks
from linformers.models.chunks import Rows, read, run_in_chunks
from linformers.models.stack import Linformer
from linformers.nn.mismatch import mismatch
from linformers.ops.masks import check_mask
from linformers.ops.span import refuse


@torch.no_grad()
def stream(
    model: Linformer,
    x: Rows | Iterable[Tensor],
    mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    out: Rows | None = None,
    length: int | None = None,
) -> Rows:
    """Run an encoder stack in chunks; the output equals that of ``model(x, mask)``.

    Hooks on the modules of its layers see one chunk at a time.

    Args:
        model: a :class:`linformers.Linformer` in eval mode, neither causal nor reversible, without a window or a context.
        x: ``(b, n, channels)``: a tensor; a numpy array, for example a memory-mapped file; or an iterator of tensors
            ``(b, c, channels)``, the sequence in order.
        mask: ``(b, n)``, True where a token is real.
        chunk: positions of a chunk; None chooses a good size.
        out: where to write, ``(b, n, channels)``: a tensor, or a numpy array, for example a memory-mapped file; not ``x`` itself.
            Rows are also stored there between the layers, in its dtype. (numpy has no bfloat16: use float32.)
        length: n, if ``x`` is an iterator and there is no ``out``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        TypeError: for anything but a :class:`linformers.Linformer`, text models included.
        ValueError: for a model that cannot run in chunks, and for shapes that do not agree.

    Example:
        >>> import torch
        >>> from linformers import Linformer, stream
        >>> model = Linformer(input_size=4096, channels=16, dim_k=32, depth=2).eval()
        >>> x = torch.randn(1, 4000, 16)
        >>> torch.allclose(stream(model, x, chunk=512), model(x), atol=1e-5)
        True
    """
    refuse("stream")
    if not hasattr(model, "obstacle_to_chunks"):  # a compiled Linformer has it too
        raise TypeError(f"stream runs a linformers.Linformer, whose inputs are features; got {type(model).__name__}")
    if (why := model.obstacle_to_chunks()) is not None:
        raise ValueError(f"this model cannot run in chunks: {why}")
    checks.whole(chunk=chunk, length=length)
    checks.at_least_one(chunk=chunk)
    tensors = {name: one for name, one in (("x", x), ("mask", mask)) if isinstance(one, Tensor)}
    if (wrong := mismatch(model, tensors, ("x",), ("mask",))) is not None:
        raise wrong
    like, parts = next(model.parameters(), x if isinstance(x, Tensor) else torch.empty(0)), model.parts()
    if isinstance(x, Tensor | numpy.ndarray):
        if len(x.shape) != 3:
            raise ValueError(f"expected x of shape (batch, length, channels={model.channels}), got {tuple(x.shape)}")
        n, whole, first = x.shape[1], x, read(x, 0, 0, like)
        size = chunk or parts.chunk_length(len(x))
        chunks: Iterable[Tensor] = (read(whole, o, min(o + size, n), like) for o in range(0, n, size))
    else:
        known = length if out is None else out.shape[1]
        if known is None:
            raise ValueError("an iterator has no length; give length, or out")
        iterator, n, whole = iter(x), known, None
        first = next(iterator, like.new_empty(0, 0, model.channels))
        size = chunk or parts.chunk_length(len(first))
        chunks = chain([first], iterator)
    if first.dim() != 3 or first.shape[2] != model.channels:
        raise ValueError(
            f"expected x of shape (batch, length, channels={model.channels}), got {(*first.shape[:1], n, *first.shape[2:])}"
        )
    model.check_length(n)
    batch = len(first)
    check_mask(mask, (batch, n))
    if out is None:
        out = first.new_empty(batch, n, model.channels)
    elif tuple(out.shape) != (batch, n, model.channels):
        raise ValueError(
            f"out must be (batch, length, channels) = {(batch, n, model.channels)}, got {tuple(out.shape)}"
        )
    elif not (out.is_floating_point() if isinstance(out, Tensor) else out.dtype.kind == "f"):
        raise ValueError(f"out must hold floating-point numbers, got {out.dtype}")
    return run_in_chunks(parts, chunks, n, mask, out, size=size, whole=whole)
