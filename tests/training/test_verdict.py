"""Results compared with their baselines in words, and what to try if a baseline is better."""

import pytest
from training_cases import run

from linformers.training import load_run
from linformers.training.verdict import verdict

FREQUENCIES = {"loss": 6.0, "perplexity": 400.0, "accuracy": 0.1}
COUNTED = {"name": "5-grams", "loss": 4.0, "perplexity": 55.0, "accuracy": 0.3}


def text(loss, perplexity, **more):
    return {"task": "clm", "loss": loss, "perplexity": perplexity, "accuracy": 0.2, "baseline": FREQUENCIES, **more}


def test_a_language_model_is_measured_by_its_perplexity():
    assert verdict(text(5.0, 150.0)) == ["ahead of frequencies alone: perplexity 150.0 against 400.0"]
    (said,) = verdict(text(5.0, 150.0, baselines=[COUNTED]))
    assert said.startswith("not ahead of 5-grams: perplexity 150.0 against 55.0; try more --max-steps")
    assert verdict(text(3.0, 20.0, baselines=[{**COUNTED, "note": "counted on 3 of 9 tokens"}])) == [
        "ahead of 5-grams: perplexity 20.0 against 55.0",
        "5-grams: counted on 3 of 9 tokens",
    ]
    assert verdict({"task": "clm", "loss": 3.0}) == []


def test_classes_are_measured_by_accuracy_and_overconfidence_is_named():
    words = {"name": "TF-IDF regression", "loss": 0.4, "perplexity": 1.5, "accuracy": 0.866}
    base = {"loss": 0.69, "perplexity": 2.0, "accuracy": 0.5}
    results = {"task": "classify", "loss": 1.2, "perplexity": 3.3, "accuracy": 0.633, "unseen": 0.4, "baseline": base}
    first, second = verdict({**results, "baselines": [words]})
    assert first.startswith(
        "not ahead of TF-IDF regression: accuracy 63.3 % against 86.6 %; try a larger --n or --long windows (the model"
    )
    assert "never reads 40% of the text" in first
    assert "--from a run of mlm or an encoder" in first
    assert second.startswith(
        "its probabilities are worse than the frequencies alone (loss 1.200 against 0.690): it is overconfident; "
    )
    assert verdict({**results, "loss": 0.3, "accuracy": 0.9, "baselines": [words]}) == [
        "ahead of TF-IDF regression: accuracy 90.0 % against 86.6 %"
    ]
    untrained = {**results, "accuracy": 0.5, "baselines": [words]}
    counted = {**results, "examples_tested": 600, "baselines": [words]}
    assert "accuracy 63.3 % against 86.6 % (± 3.8 with 600 texts); try" in verdict(counted)[0]
    assert "(± 33.5 with 3 texts)" in verdict({**counted, "accuracy": 1.0, "examples_tested": 3})[0]
    assert verdict(untrained)[1].endswith("(loss 1.200 against 0.690): it has learned nothing yet")
    assert len(verdict({**untrained, "loss": 0.693})) == 1


def test_a_perfect_model_is_given_no_advice():
    results = {"task": "classify", "loss": 0.1, "accuracy": 1.0, "baseline": {"loss": 0.7, "accuracy": 1.0}}
    assert verdict(results) == ["level with frequencies alone: accuracy 100.0 % against 100.0 %"]
    (said,) = verdict({**results, "accuracy": 0.9, "baseline": {"loss": 0.7, "accuracy": 0.9}})
    assert said.startswith("level with frequencies alone: accuracy 90.0 % against 90.0 %; try ")


def test_more_updates_are_advised_where_the_last_weights_were_the_best():
    base = {"loss": 2.0, "accuracy": 0.9}
    results = {"task": "classify", "loss": 0.5, "accuracy": 0.8, "baseline": base, "step": 100}
    had = {"patience": 5, "dropout": 0.1, "source": "run", "max_steps": 100}
    said = "try more --epochs or --max-steps (the last weights were the best), or more texts"
    assert verdict({**results, "had": had})[0].endswith(said)
    assert verdict({**results, "step": 40, "had": had})[0].endswith("try more texts")


def test_a_model_that_has_learned_hardly_anything_is_to_learn_first():
    """A model at the frequencies does not overfit: dropout and early stopping are no help."""
    base, words = {"loss": 0.693, "accuracy": 0.5}, {"name": "words", "loss": 0.1, "accuracy": 1.0}
    results = {"task": "classify", "loss": 0.674, "accuracy": 0.5, "baseline": base, "baselines": [words]}
    had = {"dropout": 0.0, "source": "run", "patience": 0, "max_steps": 12}
    (said,) = verdict({**results, "had": had})
    assert said.endswith(
        "try more --epochs or another --learning-rate (it has learned hardly more than the frequencies), or more texts"
    )
    for more in ({"accuracy": 0.8}, {"loss": 0.5}):
        assert "--dropout 0.1" in verdict({**results, **more, "had": had})[0]
        (said,) = verdict({**results, **more, "had": {**had, "patience": 5, "freeze_body": True}})
        assert said.endswith("try training the body too (without --freeze-body), or more texts")  # it has no dropout


def test_weighted_classes_are_not_blamed_for_what_they_are_for():
    """Rare classes are likelier to such a model than they are, so that its accuracy and loss may be worse than those of the frequencies."""
    results = {"task": "classify", "loss": 0.5, "accuracy": 0.85, "baseline": {"loss": 0.3, "accuracy": 0.92}}
    said = (
        "its probabilities are worse than the frequencies alone (loss 0.500 against 0.300): it has learned nothing yet"
    )
    assert verdict(results)[1] == said
    had = {"class_weights": "balanced", "patience": 5, "dropout": 0.5, "source": "run"}
    first, second = verdict({**results, "had": had})
    assert first.endswith("85.0 % against 92.0 %; try more texts")
    assert second.endswith("costs accuracy and loss; compare the recall of each class, which linformers evaluate shows")
    assert len(verdict({**results, "accuracy": 0.95, "had": had})) == 1


def test_nothing_is_advised_that_the_run_had():
    base, words = {"loss": 0.6, "perplexity": 1.8, "accuracy": 0.5}, {"name": "words", "accuracy": 0.9}
    results = {"task": "classify", "loss": 1.2, "accuracy": 0.6, "baseline": base, "baselines": [words]}
    had = {"patience": 3, "dropout": 0.1, "source": "run"}
    first, second = verdict({**results, "had": had})
    assert first.endswith("90.0 %; try more texts")
    assert second.endswith("a lower --learning-rate or --label-smoothing 0.1 helps")
    assert verdict({**results, "had": {**had, "label_smoothing": 0.1}})[1].endswith("a lower --learning-rate helps")
    first, second = verdict({**results, "had": {"patience": 0, "dropout": 0.0}})
    assert first.endswith("try --from a run of mlm or an encoder, --patience 3 (it keeps the weights of the "
                          "best evaluation), --dropout 0.1, or more texts")  # fmt: skip
    assert second.endswith("--patience 3 keeps the weights from before it became so")
    (said,) = verdict(text(5.0, 500.0, had={"source": "run"}))
    assert said.endswith("try more --max-steps, or more text")


def test_results_say_what_the_run_had(data, tmp_path):
    found = run("classify", data["classify"], tmp_path / "run", max_steps=1)
    expected = {"patience": 5, "dropout": 0.1, "max_steps": 1, "label_smoothing": 0.1}
    assert found["had"] == load_run(tmp_path / "run").results["had"] == expected


def test_several_classes_are_measured_by_f1():
    """Accuracy also counts every pair of a text and a class that it does not have, so that it is high where nothing is found."""
    base = {"loss": 0.3, "perplexity": 1.3, "accuracy": 0.95, "f1": 0.0}
    results = {"task": "classify", "loss": 0.2, "perplexity": 1.2, "accuracy": 0.95, "f1": 0.6, "exact": 0.5}
    assert verdict({**results, "baseline": base}) == ["ahead of frequencies alone: f1 60.0 % against 0.0 %"]


@pytest.mark.parametrize("task, name", [("clm", "8-grams"), ("mlm", "neighbours"), ("classify", "TF-IDF regression")])
def test_a_baseline_depends_on_the_data_alone(task, name, data, tmp_path):
    results = [run(task, data[task], tmp_path / str(depth), max_steps=1, depth=depth) for depth in (1, 2)]
    assert results[0]["loss"] != results[1]["loss"]
    assert results[0]["baselines"] == results[1]["baselines"]
    assert [one["name"] for one in results[0]["baselines"]] == [name]
    assert load_run(tmp_path / "1").results["baselines"] == results[0]["baselines"]
