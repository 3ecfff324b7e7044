"""What the results of a test say: ahead of what counting gives or behind it, and what to try then."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

FREQUENCIES = "frequencies alone"
MUCH_UNSEEN = 0.05  # share of the text beyond n tokens that is worth a word
TRIED = {
    "classify": (
        "--from a run that was trained on text (mlm), --patience 3 (it keeps the weights of the best evaluation), --dropout 0.1, or more "
        "texts"
    ),
    "other": "more --max-steps, a larger --preset, --from a run on more text, or more text",
}


def against(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The baselines of results by name: the frequencies, then what counting more gives."""
    if results.get("baseline"):
        yield FREQUENCIES, results["baseline"]
    for one in results.get("baselines", ()):
        yield one["name"], one


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Sentences about results: how they compare with the best baseline, what to try if they are behind, and what was sampled."""
    classify = results.get("task") == "classify"
    key, scale, form = ("accuracy", 100, "{:.1f} %") if classify else ("perplexity", 1, "{:,.1f}")
    known = [(name, scores) for name, scores in against(results) if is_number(scores.get(key))]
    own = results.get(key)
    if not known or not is_number(own):
        return []
    sign = 1 if classify else -1
    name, best = max(known, key=lambda one: sign * one[1][key])
    numbers = f"{form.format(scale * own)} against {form.format(scale * best[key])}"
    said = []
    if sign * (own - best[key]) > 0:
        said.append(f"ahead of {name}: {key} {numbers}")
    else:
        said.append(f"not ahead of {name}: {key} {numbers}; try {advice(results)}")
    frequent = dict(known).get(FREQUENCIES, {})
    if classify and is_number(results.get("loss")) and results["loss"] > frequent.get("loss", results["loss"]):
        said.append(
            f"its probabilities are worse than the {FREQUENCIES} (loss {results['loss']:.3f} against {frequent['loss']:.3f}): it is "
            "wrong with too much certainty; --patience 3 keeps the weights before that"
        )
    return said + [f"{one}: {scores['note']}" for one, scores in known if scores.get("note")]


def advice(results: Mapping[str, Any]) -> str:
    """What to try when a baseline is better."""
    unseen = results.get("unseen", 0.0)
    if results.get("task") != "classify":
        return TRIED["other"]
    longer = f"a larger --n (the model never reads {unseen:.0%} of the text), " if unseen > MUCH_UNSEEN else ""
    return longer + TRIED["classify"]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and not missing."""
    return isinstance(value, int | float) and not isinstance(value, bool)
