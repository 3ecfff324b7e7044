"""What a run tells others: its model card, an upload to the hub, and metrics to the integrations of the Trainer."""

import re

import pytest
import torch
import transformers
from hub_stand_in import hub
from training_cases import rows, run, settings

from linformers.training import Settings, load_run, train
from linformers.training.card import limits_of, names_alone, plain


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, labelled):
    out = tmp_path_factory.mktemp("trained")
    for task, data in (("clm", text), ("classify", labelled)):
        run(task, data, out / task, max_steps=2)
    return {task: load_run(out / task) for task in ("clm", "classify")}


@pytest.mark.parametrize("task", ["clm", "classify"])
def test_the_card_says_what_the_run_found(task, trained, monkeypatch):
    from huggingface_hub import ModelCard

    opened = trained[task]
    card = ModelCard.load(opened.directory / "final" / "README.md")
    assert card.data.pipeline_tag == {"clm": "text-generation", "classify": "text-classification"}[task]
    assert "linformers" in card.data.tags
    results = opened.results
    for scores in (results, results["baseline"], *results["baselines"]):
        assert f"| {scores['loss']:.3f} | {scores['perplexity']:.2f} | {100 * scores['accuracy']:.1f} % |" in card.text
    assert f"{results['parameters']:,} parameters" in card.text
    assert re.search(r"\| k \| 6 \|", card.text)
    assert "The longest input is 24 tokens" in card.text
    assert ("| fruit | " in card.text) == (task == "classify")
    assert str(opened.directory.parent) not in card.text  # no paths of this machine
    monkeypatch.chdir(opened.directory)
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names := {})
    assert type(names["model"]) is type(opened.model)


def test_the_card_names_what_the_weights_began_with(trained, tmp_path, text):
    begun = "It began with"
    assert begun not in (trained["clm"].directory / "final" / "README.md").read_text()
    source = Settings(source=str(trained["clm"].directory), data=(str(text),), max_steps=1)
    train(source, tmp_path / "tuned", progress=False)
    card = (tmp_path / "tuned" / "final" / "README.md").read_text()
    taken = trained["clm"].results["parameters"]
    assert f"{begun} {taken:,} weights of clm, a model of the task clm;\nwhat that was" in card
    assert str(trained["clm"].directory.parent) not in card


def test_text_from_files_is_no_markup():
    assert plain("a|b <img src=x>\n# `c`") == r"a\|b \<img src=x\> \# \`c\`"
    assert names_alone("/home/me/books, letters.txt") == "books, letters.txt"


def test_the_card_names_the_weakness_of_the_slots():
    given = {"attention": "linformer", "open_slots": 0, "method": "content"}
    found = {
        limits_of(given | change) for change in ({}, {"open_slots": 2}, {"method": "learnable"}, {"attention": "full"})
    }
    assert len(found) == 4
    assert "" in found


def test_push_to_hub(trained, tmp_path, monkeypatch):
    """By transformers' own code, to a stand-in on the loopback address; the card goes first, and stays."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    opened = trained["clm"]
    with hub(monkeypatch) as found:
        huggingface_hub.create_repo("me/model", token="none")
        huggingface_hub.ModelCard.load(opened.directory / "final" / "README.md").push_to_hub("me/model", token="none")
        opened.model.push_to_hub("me/model", token="none")
        opened.tokenizer.push_to_hub("me/model", token="none")
    for name, content in found.files["me/model"].items():
        (tmp_path / name).write_bytes(content)
    assert (tmp_path / "README.md").read_text() == (opened.directory / "final" / "README.md").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)("the cat sat", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(again(tokens).logits, opened.model(tokens).logits)


class Recorder(transformers.TrainerCallback):
    """Stands for an integration."""

    seen: list = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **options):
        self.seen.append((state.global_step, dict(logs)))


def test_metrics_go_to_the_integrations_that_are_asked_for(text, tmp_path, monkeypatch):
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    Recorder.seen.clear()
    out = tmp_path / "run"
    run("clm", text, out, max_steps=2, eval_steps=2, log_to=("wandb",))
    lines = rows(out)
    assert [step for step, logs in Recorder.seen if "loss" in logs] == [1, 2]
    evaluations = [(step, logs["eval_loss"]) for step, logs in Recorder.seen if "eval_loss" in logs]
    assert evaluations == [(line["step"], line["loss"]) for line in lines if line["part"] == "validation"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandbb", "--log-to wandbb is not an integration of transformers; there are azure_ml"),
        ("comet_ml", "--log-to comet_ml needs a package that is not installed; run: pip install comet_ml"),
        ("flyte", "--log-to flyte works only inside a task of its own; there are azure_ml"),
        ("kubeflow", "--log-to kubeflow is not available here; transformers' page about callbacks says what it needs"),
    ],
)
def test_integrations_that_are_not_there(name, words, text, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(settings("clm", text, log_to=(name,)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
