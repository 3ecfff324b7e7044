"""Adds defaults to the documentation of settings, so that no number is written twice."""

from collections.abc import Collection, Mapping
from typing import Any


def with_defaults(
    text: str,
    names: Collection[str],
    defaults: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Mapping[str, Mapping[str, Any]]],
    vocabulary: Mapping[str, int],
    words: Mapping[str, str],
) -> str:
    """The documentation of settings, with defaults added where there is one.

    Args:
        text: a section with the name of each setting on a line of its own.
        names: of all settings.
        defaults: those that do not depend on the preset.
        presets: the values of each preset.
        sizes: those of tasks that have others.
        vocabulary: replaces ``{vocabulary}``.
        words: further marks in the text, and what replaces them.
    """
    lines: list[str] = []
    name = ""
    words = {"{vocabulary}": by_preset(vocabulary), **words}
    for line in [*text.splitlines(), ""]:
        if (line.strip() in names or not line.strip()) and name:  # the text of the previous setting ends here
            lines[-1] += default_of(name, defaults, presets, sizes)
        name = line.strip() if line.strip() in names else name if line.strip() else ""
        for mark, replacement in words.items():
            line = line.replace(mark, replacement)
        lines.append(line)
    return "\n".join(lines)


def default_of(
    name: str,
    defaults: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> str:
    """A sentence about the default of a setting; nothing if it depends on the others."""
    if name in defaults:
        value = defaults[name]
        return f" Default: {('yes' if value else 'no') if isinstance(value, bool) else value}."
    values = {preset: known[name] for preset, known in presets.items() if name in known}
    if not values:
        return ""
    others = [
        f"; for {task} {by_preset({preset: known.get(name, values[preset]) for preset, known in own.items()})}"
        for task, own in sizes.items()
        if any(name in known for known in own.values())
    ]
    return f" Default by preset: {by_preset(values)}{''.join(others)}."


def by_preset(values: Mapping[str, Any]) -> str:
    """A value for each preset."""
    return ", ".join(f"{preset} {value:,}" for preset, value in values.items())
