"""Sequence projections: n positions to k slots."""

from linformers.projections.base import KEY, VALUE, Projection, Slots, Sums, check_length
from linformers.projections.convolution import Convolution
from linformers.projections.dense import STARTS, Dense, Given
from linformers.projections.make import (
    METHODS,
    SHARINGS,
    Method,
    make_projection,
    projection_parameters,
    slots_per_layer,
)
from linformers.projections.own import Custom
from linformers.projections.pooling import Max, Mean

__all__ = [
    "KEY",
    "METHODS",
    "SHARINGS",
    "STARTS",
    "VALUE",
    "Convolution",
    "Custom",
    "Dense",
    "Given",
    "Max",
    "Mean",
    "Method",
    "Projection",
    "Slots",
    "Sums",
    "check_length",
    "make_projection",
    "projection_parameters",
    "slots_per_layer",
]
