"""What layers whose sequence is split over processes cannot do, and where the sequence may be split."""

from collections.abc import Iterable, Iterator

from torch import nn

from linformers.nn.attention import Attention
from linformers.nn.layer import Layer, Trace
from linformers.nn.state import DecodingState
from linformers.ops.span import Span, check_blocks
from linformers.projections.base import Projection
from linformers.projections.content import Content
from linformers.projections.convolution import Convolution
from linformers.projections.dense import Dense, Given
from linformers.projections.own import Custom
from linformers.projections.pooling import Max, Mean
from linformers.watch import is_watched

SUMS = (Dense, Given, Convolution, Mean, Max, Content)


def check_split(
    layers: Iterable[Layer], shared: Projection | None, span: Span, state: DecodingState | None, trace: Trace
) -> None:
    """Raise a ValueError, the same in every process, if these layers cannot run with their sequence split like this.

    Args:
        shared: the projection of the layers that have none of their own.
    """
    found = [layer.attention for layer in layers if layer.attention is not None]
    if state is not None:
        raise ValueError(_refused("it was given a state to fill, and decoding needs all positions in one process"))
    for attention in found:
        if attention.causal and span.padded:
            raise ValueError(
                "a causal model counts positions from the first real token of each row, and some rows begin with padding; "
                "align the rows to the left before they are split over processes"
            )
        if attention.block and trace.need_weights:
            raise ValueError(_refused("need_weights=True with exact neighbours; ask for the weights in one process"))
        for why in _obstacles(attention, shared):
            raise ValueError(_refused(why))
    for attention in found:
        _check_rows(attention, shared, span)
    check_blocks(span, sorted({attention.block for attention in found if attention.block}))


def check_context(crosses: Iterable[Attention], shared: Projection | None, span: Span) -> None:
    """Raise a ValueError, the same in every process, if a context that is split over processes cannot be prepared for these layers."""
    for cross in crosses:
        for why in _obstacles(cross, shared):
            raise ValueError(_refused(why))
        _check_rows(cross, shared, span)


def obstacles(layers: Iterable[nn.Module], shared: Projection | None, context: Projection | None) -> Iterator[str]:
    """Why a stack cannot run with its sequence, or its context, split over processes.

    Args:
        shared: the projection of the layers that have none of their own.
        context: the same for cross-attention.
    """
    for layer in layers:
        if isinstance(layer, Layer):
            if layer.attention is not None:
                yield from _obstacles(layer.attention, shared)
            if layer.cross is not None:
                yield from _obstacles(layer.cross, context)


def _check_rows(attention: Attention, shared: Projection | None, span: Span) -> None:
    """Raise a ValueError, the same in every process, if some process does not have the rows of E of its positions."""
    projection = shared if attention.projection is None else attention.projection
    if isinstance(projection, Dense) and projection.owned is not None:
        projection.owned.check(span)


def _obstacles(attention: Attention, shared: Projection | None) -> Iterator[str]:
    if attention.kind == "full":
        yield "full attention needs the keys of all positions; use attention='linformer' (and cross_attention='linformer')"
    if attention.kind != "linformer":
        return
    projection = shared if attention.projection is None else attention.projection
    if isinstance(projection, Custom):
        yield "a user-defined projection module needs the whole input; use a named method or a matrix"
    elif type(projection) not in SUMS:
        yield f"a projection of type {type(projection).__name__} is not known to be a sum over positions; use a named method"
    elif is_watched(projection):
        yield "there are hooks on a projection, which no process runs on the whole input; remove them first"


def _refused(why: str) -> str:
    return f"this model cannot run with its sequence split over processes: {why}"
