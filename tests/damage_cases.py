"""Damaged JSON files: every field missing or of another type, and what a command may say about it."""

import json

from linformers.cli import launch

DEEP = "[" * 100_000 + "]" * 100_000
ABSENT = object()
VALUES = (ABSENT, "x", -1, 10**30, [], {"a": 1}, None, 1.5, [["x"]])


def places(value, before=()):
    """The paths of all fields, and of the first entry of each list."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for name, one in inner:
        yield (*before, name)
        yield from places(one, (*before, name))


def changed(text, place, new):
    """The JSON text with another value at a path, or without it."""
    found = json.loads(text)
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    if new is ABSENT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return json.dumps(found)


def ends_well(capsys, *words):
    """Run a command, which must succeed or end with one line of error: its exit code, and what it printed."""
    code = launch(*map(str, words))
    said = capsys.readouterr().err
    assert code in (0, 1)
    if code:
        assert said.strip().splitlines()[-1].startswith("error: "), said
        assert "Traceback" not in said
    return code, said
