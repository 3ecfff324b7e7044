"""Chooses cases from a product of options, such that every two values of two options meet in one of them.

A fault that needs three options at once is rare; a full product computes the same again and again.
"""

import itertools
from typing import Any


def covering(**options: Any) -> dict[str, Any]:
    """For ``pytest.mark.parametrize``: cases of ``options``, by name, in which every pair of values meets.

    Args:
        options: the values of each; a dict gives them names. Values of ``a__b`` are tuples, for two arguments.
    """
    values = [list(found.values()) if isinstance(found, dict) else list(found) for found in options.values()]
    labels = [list(found) if isinstance(found, dict) else [label(each) for each in found] for found in options.values()]
    sizes = [range(len(found)) for found in values]
    missing = {
        ((a, i), (b, j)) for a, b in itertools.combinations(range(len(sizes)), 2) for i in sizes[a] for j in sizes[b]
    }
    cases = list(itertools.product(*sizes))
    chosen = []
    while missing:
        case = max(cases, key=lambda case: len(pairs(case) & missing))  # the first of the best
        missing -= pairs(case)
        chosen.append(case)
    chosen.sort()
    names = [name.split("__") for name in options]
    return {
        "argnames": tuple(itertools.chain(*names)),
        "argvalues": [
            tuple(x for a, i in enumerate(case) for x in (values[a][i] if len(names[a]) > 1 else [values[a][i]]))
            for case in chosen
        ],
        "ids": ["-".join(labels[a][i] for a, i in enumerate(case)) for case in chosen],
    }


def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(case), 2))


def label(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(label, value))
    return getattr(value, "__name__", str(value))
