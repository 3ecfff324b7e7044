"""What :func:`linformers.linearize.linearize` did to a model: what it replaced, what it left alone, and why."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """One attention that now attends to slots.

    Attributes:
        name: of the module, as in ``model.named_modules()``.
        k: its slots.
        how: its method and its other options, in words.
        error_before: the error of the attention output on the calibration inputs with plain means, relative to the size of the output; None
            without a fit.
        error_after: the same after the fit.
        exact_keys: the most exact keys that a query sees where slots are opened, neighbours included; 0 where none are opened.
    """

    name: str
    k: int
    how: str
    error_before: float | None = None
    error_after: float | None = None
    exact_keys: int = 0


@dataclass(frozen=True)
class Left:
    """One attention that was not replaced."""

    name: str
    why: str


@dataclass
class Report:
    """All attention of a model, replaced or left alone. ``print`` it.

    Attributes:
        positions: what was done to the positions, or empty.
    """

    max_len: int
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    positions: str = ""

    def __str__(self) -> str:
        names = [new.name for new in self.replaced] + [old.name for old in self.left]
        width = max(map(len, names), default=0)
        lines = [f"replaced {len(self.replaced)}, left {len(self.left)} (inputs of at most {self.max_len} positions)"]
        lines += [f"  ! {self.positions}"] if self.positions else []
        for new in self.replaced:
            line = f"  + {new.name:{width}}  k = {new.k}, {new.how}"
            if new.exact_keys:
                line += f" (at most {new.exact_keys} exact keys per query)"
            if new.error_before is not None and new.error_after is not None:
                line += f", error {new.error_before:.3f} -> {new.error_after:.3f}"
            lines.append(line)
        lines += [f"  - {old.name:{width}}  left: {old.why}" for old in self.left]
        return "\n".join(lines)
