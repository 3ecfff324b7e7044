"""The label of a position that the loss ignores; the default of ``F.cross_entropy``."""

IGNORED = -100
