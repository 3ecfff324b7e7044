"""The oldest versions that ``pyproject.toml`` allows, in an environment of their own; ``make oldest``.

    python tests/oldest.py bounds                 one line for each bound, as a file of constraints for pip
    python tests/oldest.py check                  the versions of this environment are those

Only what the package itself needs is held back: what runs the tests, and what other packages need, is new. The extra ``export`` needs a newer torch than
the others, and is left out.
"""

import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

EXTRAS = ("hf", "train", "keras", "cli")


def bounds() -> dict[str, str]:
    """The lower bound of each requirement of the package and of its extras; where two give one, the higher."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("linformers["):
            continue
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)", line)
        if match is None:
            sys.exit(f"{line} has no lower bound of the form name>=1.2")
        name, low = match.groups()
        found[name] = max(found.get(name, "0"), low, key=numbers)
    return found


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers, without zeros at its end; of torch, without the build (2.7.0+cpu)."""
    parts = [int(part) for part in text.partition("+")[0].split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def main() -> None:
    oldest = bounds()
    if sys.argv[1:] == ["bounds"]:
        print("\n".join(f"{name}=={low}" for name, low in oldest.items()))
    elif sys.argv[1:] == ["check"]:
        wrong = [f"{name} {version(name)}" for name, low in oldest.items() if numbers(version(name)) != numbers(low)]
        if wrong:
            sys.exit(f"not the oldest versions: {', '.join(wrong)}")
        print(", ".join(f"{name} {version(name)}" for name in oldest))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
