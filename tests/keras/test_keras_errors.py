"""The rows about Keras in ``docs/errors.md`` are true on every backend."""

from errors_cases import agrees, outcome, rows, sections, setup


def test_rows():
    text = sections()["Keras"]
    exec(setup(text), space := {})
    wrong = [
        f"{code}\n  says {found}\n  not  {expected}"
        for code, expected in rows(text)
        if not agrees(found := outcome(code, space), expected)
    ]
    assert not wrong, "\n".join(wrong)
