"""The label of a position that is not scored: what ``F.cross_entropy`` leaves out by default."""

IGNORED = -100
