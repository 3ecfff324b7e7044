"""What the results of a test say: ahead of what counting gives or behind it, and what to try then."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

FREQUENCIES = "frequencies alone"
MUCH_UNSEEN = 0.05  # share of the text beyond n tokens that is worth a word
SOME_DROPOUT = 0.1


def against(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The baselines of results by name: the frequencies, then what counting more gives."""
    if results.get("baseline"):
        yield FREQUENCIES, results["baseline"]
    for one in results.get("baselines", ()):
        yield one["name"], one


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Sentences about results: how they compare with the best baseline, what to try if they are behind, and what was sampled."""
    classify = results.get("task") == "classify"
    key = judged_by(results)
    scale, form = (100, "{:.1f} %") if classify else (1, "{:,.1f}")
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
            f"wrong with too much certainty; {certain(results)}"
        )
    return said + [f"{one}: {scores['note']}" for one, scores in known if scores.get("note")]


def advice(results: Mapping[str, Any]) -> str:
    """What to try when a baseline is better; not what the run had already, as far as the results say."""
    unseen, own = results.get("unseen", 0.0), results.get("had", {})
    if results.get("task") != "classify":
        begin = () if own.get("source") else ("--from a run on more text",)
        return listed("more --max-steps", "a larger --preset", *begin, "more text")
    tried = [f"a larger --n (the model never reads {unseen:.0%} of the text)"] if unseen > MUCH_UNSEEN else []
    if not own.get("source"):
        tried.append("--from a run that was trained on text (mlm)")
    if not own.get("patience"):
        tried.append("--patience 3 (it keeps the weights of the best evaluation)")
    if own.get("dropout", 0.0) < SOME_DROPOUT:
        tried.append(f"--dropout {SOME_DROPOUT}")
    return listed(*tried, "more texts")


def had(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of a run, those that :func:`advice` would name."""
    return {name: settings[name] for name in ("patience", "dropout", "source") if settings.get(name) is not None}


def certain(results: Mapping[str, Any]) -> str:
    """What helps a classifier that is wrong with too much certainty."""
    if not results.get("had", {}).get("patience"):
        return "--patience 3 keeps the weights before that"
    return "a lower --learning-rate or --label-smoothing 0.1 makes it less certain"


def listed(*words: str) -> str:
    """Words with commas, and "or" before the last of several."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def judged_by(results: Mapping[str, Any]) -> str:
    """The score that says how good results are: of texts with several classes F1, as accuracy counts every pair of a text and a class."""
    if results.get("task") != "classify":
        return "perplexity"
    return "f1" if is_number(results.get("f1")) else "accuracy"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and not missing."""
    return isinstance(value, int | float) and not isinstance(value, bool)
