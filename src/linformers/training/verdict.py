"""The results of a test in words: whether they beat the count-based baselines, and what to try if they do not."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

FREQUENCIES = "frequencies alone"
MUCH_UNSEEN = 0.05  # share of the text beyond n tokens from which a larger n is advised
SOME_DROPOUT = 0.1
LAST = 0.9  # of the updates; weights from later ones show that training could go on
HARDLY = 0.9  # times the loss of the frequencies, above which a classifier without more right answers has learned hardly anything
BALANCED = "--class-weights balanced makes rare classes likelier than they are, which costs accuracy and loss"
WORSE = 1.02  # times the loss of the frequencies, from which probabilities are called worse


def against(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The baselines of results by name: the frequencies, then the other count-based ones."""
    if results.get("baseline"):
        yield FREQUENCIES, results["baseline"]
    for one in results.get("baselines", ()):
        yield one["name"], one


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Sentences about results: how they compare with the best baseline, what to try if it is better, and what was sampled."""
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
    if key == "accuracy" and is_number(count := results.get("examples_tested")):
        numbers += f" (± {100 * uncertainty(own, count):.1f} with {count:,} texts)"
    lead = sign * (own - best[key])
    how = "ahead of" if lead > 0 else "not ahead of" if lead < 0 else "level with"
    best_possible = classify and own == 1
    tried = "" if lead > 0 or best_possible else f"; try {advice(results)}"
    sentences = [f"{how} {name}: {key} {numbers}{tried}"]
    frequent, loss = dict(known).get(FREQUENCIES, {}), results.get("loss")
    if balanced(results):
        if lead <= 0 and not best_possible:
            sentences.append(f"{BALANCED}; compare the recall of each class, which linformers evaluate shows")
    elif classify and is_number(loss) and loss > WORSE * frequent.get("loss", loss):
        learned = own > frequent.get(key, own)
        why = f"it is overconfident; {calibration(results)}" if learned else "it has learned nothing yet"
        sentences.append(
            f"its probabilities are worse than the {FREQUENCIES} (loss {loss:.3f} against {frequent['loss']:.3f}): {why}"
        )
    return sentences + [f"{one}: {scores['note']}" for one, scores in known if scores.get("note")]


def uncertainty(share: float, count: float) -> float:
    """Half of the 95 % interval of a share of ``count`` texts (Agresti and Coull's, which has a width for 0 and 1 too)."""
    share = (share * count + 2) / (count + 4)
    return 1.96 * math.sqrt(share * (1 - share) / (count + 4))


def advice(results: Mapping[str, Any]) -> str:
    """What to try when a baseline is better; nothing that the run already had, as far as the results say."""
    unseen, own = results.get("unseen", 0.0), results.get("had", {})
    if results.get("task") != "classify":
        # A source has sizes of its own.
        begin = () if own.get("source") else ("a larger --preset", "--from a run on more text")
        return listed("more --max-steps", *begin, "more text")
    tried = []
    begun = learned_more(results)
    if not begun:
        tried.append("more --epochs or another --learning-rate (it has learned hardly more than the frequencies)")
    if own.get("freeze_body"):
        tried.append("training the body too (without --freeze-body)")
    if unseen > MUCH_UNSEEN:
        tried.append(f"a larger --n or --long windows (the model never reads {unseen:.0%} of the text)")
    if not own.get("source"):
        tried.append("--from a run of mlm or an encoder")
    step, steps = results.get("step"), own.get("max_steps")
    if begun and own.get("patience") and is_number(step) and is_number(steps) and step > LAST * steps:
        tried.append("more --epochs or --max-steps (the last weights were the best)")
    if begun and not own.get("patience"):
        tried.append("--patience 3 (it keeps the weights of the best evaluation)")
    if begun and not own.get("freeze_body") and own.get("dropout", 0.0) < SOME_DROPOUT:
        tried.append(f"--dropout {SOME_DROPOUT}")
    return listed(*tried, "more texts")


def learned_more(results: Mapping[str, Any]) -> bool:
    """Whether a classifier is better than the frequencies alone, in its answers or clearly in its loss."""
    key, frequent = judged_by(results), results.get("baseline") or {}
    own, usual = results.get(key), frequent.get(key)
    loss, usual_loss = results.get("loss"), frequent.get("loss")
    if not (is_number(own) and is_number(usual) and is_number(loss) and is_number(usual_loss)):
        return True
    return balanced(results) or own > usual or loss < HARDLY * usual_loss


def balanced(results: Mapping[str, Any]) -> bool:
    """Whether the run weighted rare classes more, so that accuracy and loss do not say how much it has learned."""
    return bool(results.get("had", {}).get("class_weights"))


def had(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that :func:`advice` depends on."""
    names = ("patience", "dropout", "source", "max_steps", "label_smoothing", "freeze_body", "class_weights")
    values = {name: settings.get(name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and value is not False and value != "none"
    }


def calibration(results: Mapping[str, Any]) -> str:
    """What helps an overconfident classifier."""
    own = results.get("had", {})
    if not own.get("patience"):
        return "--patience 3 keeps the weights from before it became so"
    return f"a lower --learning-rate{'' if own.get('label_smoothing') else ' or --label-smoothing 0.1'} helps"


def listed(*words: str) -> str:
    """Words with commas, and "or" before the last of several."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def judged_by(results: Mapping[str, Any]) -> str:
    """The name of the score that results are compared by; F1 for several classes per text, where accuracy counts every pair of text and class."""
    if results.get("task") != "classify":
        return "perplexity"
    return "f1" if is_number(results.get("f1")) else "accuracy"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and not missing."""
    return isinstance(value, int | float) and not isinstance(value, bool)
