"""The cases that are tested instead of a product of options."""

import itertools
import math

import pytest
from covering import covering


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (2, 2, 2, 2, 2, 2, 4), (11, 4, 3, 2)], ids=str)
def test_every_two_values_of_two_options_meet(sizes):
    options = {f"option{i}": [f"{i}.{j}" for j in range(size)] for i, size in enumerate(sizes)}
    made = covering(**options)
    assert made["argnames"] == tuple(options)
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in made["argvalues"]} == {
            (f"{a}.{i}", f"{b}.{j}") for i in range(sizes[a]) for j in range(sizes[b])
        }
    assert len(set(made["ids"])) == len(made["ids"]) <= math.prod(sizes)
