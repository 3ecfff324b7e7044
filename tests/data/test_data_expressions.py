"""ListOps: right values, right sizes, always the same."""

import numpy as np
import pytest

from linformers.data import PARTS, ListOps, listops, prepare
from linformers.data.expressions import expressions
from linformers.data.records import Reading


def value_and_depth(symbols):
    """The value of an expression and its depth, by a parser in plain loops."""
    stack = []
    depth = 0
    for i, symbol in enumerate(symbols):
        if symbol.startswith("["):
            stack.append((symbol, []))
            depth = max(depth, len(stack) + 1)
            continue
        if symbol == "]":
            operator, numbers = stack.pop()
            assert len(numbers) >= 2
            result = {
                "[MIN": min(numbers),
                "[MAX": max(numbers),
                "[MED": int(np.median(numbers)),
                "[SM": sum(numbers) % 10,
            }[operator]
        else:
            result = int(symbol)
        if not stack:
            assert i == len(symbols) - 1
            return result, depth
        stack[-1][1].append(result)
    raise AssertionError("not closed")


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 4, "max_length": 60},
        {"min_length": 20, "max_length": 40, "max_depth": 3, "max_args": 7},
        {"min_length": 500, "max_length": 2000},
    ],
)
def test_values_and_sizes_are_right(options):
    found = list(listops(60, 5, **options))
    assert len({text for text, _ in found}) == 60
    for text, value in found:
        symbols = text.split()
        assert options["min_length"] <= len(symbols) <= options["max_length"]
        right, depth = value_and_depth(symbols)
        assert value == right
        assert depth <= options.get("max_depth", 10)


def test_the_seed_decides():
    options = {"min_length": 10, "max_length": 50}
    assert list(listops(20, 1, **options)) == list(listops(20, 1, **options))
    assert list(listops(20, 1, **options)) != list(listops(20, 2, **options))
    assert list(listops(20, 1, **options)) == list(listops(30, 1, **options))[:20]


def test_the_drawing_is_the_published_one():
    """An argument is an operation with a chance of 1/4, with 2 to 10 arguments; lengths of short trees follow from it."""
    found = [text.split() for text, _ in listops(4000, 0, min_length=4, max_length=2000, max_depth=2)]
    arguments = np.array([len(symbols) - 2 for symbols in found])
    assert set(arguments) == set(range(2, 11))
    operators = np.unique([symbols[0] for symbols in found], return_counts=True)
    assert list(operators[0]) == ["[MAX", "[MED", "[MIN", "[SM"]
    assert operators[1].min() > 850
    deep = [" ".join(text.split()) for text, _ in listops(3000, 0, min_length=4, max_length=2000, max_depth=3)]
    inner = sum(text.count("[") - 1 for text in deep)
    digits = sum(sum(symbol.isdigit() for symbol in text.split()) for text in deep)
    # Nodes at depth 2 are operations or digits; those at depth 3 are digits, 6 of each operation.
    assert abs(inner / (inner + digits - 6 * inner) - 0.25) < 0.02


def test_sizes_that_cannot_be_are_errors():
    for options, message in (
        ({"min_length": 9, "max_length": 5}, "min_length=9 and max_length=5"),
        ({"min_length": 1, "max_length": 3}, "at least 4 symbols"),
        ({"max_depth": 1}, "at least 2, got 1 and 10"),
        ({"max_args": 1}, "at least 2, got 10 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            list(listops(1, 0, **options))
    with pytest.raises(ValueError, match="found only 400 of 500 different expressions with 4 to 4 symbols"):
        list(listops(500, 0, min_length=4, max_length=4))
    with pytest.raises(ValueError, match="at least one expression for training"):
        expressions(ListOps(train=0), 0)


def test_it_becomes_labelled_documents(tmp_path):
    sizes = ListOps(300, 20, 30, min_length=5, max_length=40)
    prepared = prepare(None, tmp_path / "out", listops=sizes, seed=3)
    assert prepared.kind == "labelled"
    assert prepared.labels == [str(i) for i in range(10)]
    assert prepared.vocab_size == 5 + 15
    assert [prepared.count(part) for part in PARTS] == [300, 20, 30]
    found = set()
    for part in PARTS:
        for ids, label in zip(prepared.documents(part), prepared.classes(part), strict=True):
            text = prepared.tokenizer.decode(ids)
            assert value_and_depth(text.split())[0] == label
            found.add(text)
    assert len(found) == 350
    with pytest.raises(ValueError, match="limit does not apply to ListOps"):
        prepare(None, tmp_path / "other", listops=sizes, limit=10)


def test_the_published_size_is_the_default():
    corpus = expressions(ListOps(), 0)
    assert corpus.size == 100_000
    record = next(corpus.read(Reading()))
    assert 500 <= len(record.text.split()) <= 2000
    assert record.part == "train"
