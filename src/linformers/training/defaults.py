"""Adds defaults to the documentation of settings, so that no number is written twice."""

from collections.abc import Collection, Mapping
from typing import Any

from linformers.training.presets import (
    ASSIGNED,
    BY_TASK,
    CLASSIFY_FROM,
    DEFAULTS,
    FROM,
    OPENED,
    PRESETS,
    SIZES,
    SLOTS,
    SMALL_START,
    STOPPING,
    VOCABULARY,
)


def with_defaults(text: str, names: Collection[str]) -> str:
    """The documentation of settings, with defaults added where there is one.

    Args:
        text: a section with the name of each setting on a line of its own.
        names: of all settings.
    """
    lines: list[str] = []
    name = ""
    for line in [*text.splitlines(), ""]:
        if (line.strip() in names or not line.strip()) and name:  # the text of the previous setting ends here
            lines[-1] += default_of(name)
        name = line.strip() if line.strip() in names else name if line.strip() else ""
        for mark, replacement in WORDS.items():
            line = line.replace(mark, replacement)
        lines.append(line)
    return "\n".join(lines)


def default_of(name: str) -> str:
    """A sentence about the default of a setting; nothing if it depends on the others."""
    if name in SHOWN:
        value = SHOWN[name]
        return f" Default: {('yes' if value else 'no') if isinstance(value, bool) else value}."
    values = {preset: known[name] for preset, known in PRESETS.items() if name in known}
    if not values:
        return ""
    others = [
        f"; for {task} {by_preset({preset: known.get(name, values[preset]) for preset, known in own.items()})}"
        for task, own in SIZES.items()
        if any(name in known for known in own.values())
    ]
    return f" Default by preset: {by_preset(values)}{''.join(others)}."


def by_preset(values: Mapping[str, Any]) -> str:
    """A value for each preset."""
    return ", ".join(f"{preset} {value:,}" for preset, value in values.items())


# Marks in the text, and what replaces them.
WORDS = {
    "{vocabulary}": by_preset(VOCABULARY),
    "{slots}": by_preset({preset: sizes["k"] for preset, sizes in SIZES["classify"].items()}),
    "{rates}": f"{FROM['linformer']['rate']} times that of the preset, or for classify {CLASSIFY_FROM['linformer']['rate']} times the one "
    f"that it has for mlm, and {FROM['encoder']['learning_rate']:g} for an encoder",
    "{epochs}": f"{CLASSIFY_FROM['linformer']['epochs']:g}, or {CLASSIFY_FROM['encoder']['epochs']:g} from an encoder",
}
ASSIGNING, OPENING = (" and ".join(task for task in SLOTS if SLOTS[task] is kind) for kind in (ASSIGNED, OPENED))
TYING = " and ".join(task for task, values in BY_TASK.items() if values.get("tie"))
# Defaults that do not depend on the preset.
SHOWN: dict[str, Any] = {
    **DEFAULTS,
    **{name: f"{DEFAULTS[name]}, and {value} for classify" for name, value in STOPPING["classify"].items()},
    **{
        name: f"{DEFAULTS[name]}, and {BY_TASK['classify'][name]} for classify, except from an encoder"
        for name in ("label_smoothing", "token_dropout")
    },
    "tie": f"no, and yes for {TYING}",
    "embedding_scale": f"{SMALL_START['embedding_scale']}, and {DEFAULTS['embedding_scale']} for seq2seq",
    "method": f"{ASSIGNED['method']} for {ASSIGNING}, {OPENED['method']} for {OPENING}",
    "sharing": f"{DEFAULTS['sharing']}, and {ASSIGNED['sharing']} for content",
    "open_slots": f"{OPENED['open_slots']} for {OPENING} without --method, otherwise {DEFAULTS['open_slots']}",
}
