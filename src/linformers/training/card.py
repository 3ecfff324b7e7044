"""The model card of a run: ``README.md`` beside its final weights, for readers and for the Hugging Face hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from linformers.files.whole import write_text
from linformers.training.checking import without_effect
from linformers.training.runs import FINAL, Run
from linformers.training.settings import Settings
from linformers.training.verdict import against, verdict

CARD = "README.md"
KINDS = {
    "mlm": ("A masked language model", "AutoModelForMaskedLM", "fill-mask"),
    "clm": ("A causal language model", "AutoModelForCausalLM", "text-generation"),
    "seq2seq": ("A sequence-to-sequence model", "AutoModelForSeq2SeqLM", "text2text-generation"),
    "classify": ("A classifier of texts", "AutoModelForSequenceClassification", "text-classification"),
}
ATTENTION = {
    "linformer": " with attention to slots, whose cost grows linearly with the sequence ([Linformer](https://arxiv.org/abs/2006.04768))",
    "full": " with full attention",
    "local": " with attention to neighbours alone",
    "none": " without self-attention",
}
# Settings that are paths of a machine, or say nothing about the model.
LEFT_OUT = ("data", "targets", "tokenizer", "source", "threads", "workers", "keep", "save_steps", "log_steps", "log_to")


def write_card(run: Run, results: Mapping[str, Any]) -> None:
    """Write the model card into ``final/``, if these are its results.

    Args:
        run: a run that is trained.
        results: of its test part.

    Raises:
        OSError: if it could not be written.
    """
    final = run.directory / FINAL
    if run.weights == final:
        write_text(final / CARD, card(run, results))


def card(run: Run, results: Mapping[str, Any]) -> str:
    """The text of the model card: metadata that the hub reads, then Markdown."""
    from huggingface_hub import ModelCardData

    kind, auto, pipeline = KINDS[run.task]
    name = run.directory.resolve().name
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["linformers", "linformer", run.settings.attention],
        metrics=["accuracy"] if run.task == "classify" else ["perplexity", "accuracy"],
    )
    environment = Environment(
        loader=PackageLoader("linformers.training"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["plain"] = plain
    prepared, settings = run.prepared, run.settings
    native = run.model.config.model_type == "linformer"
    text = environment.get_template("card.md").render(
        title=plain(name),
        kind=kind,
        attention=ATTENTION[run.settings.attention],
        versions={"linformers": "", "torch": "", "transformers": "", **run.about.get("versions", {})},
        results={"tokens_seen": 0, "texts_cut": 0, "per_class": [], **results},
        baselines=list(against(results)),
        verdict=[sentence.partition("; try ")[0] for sentence in verdict(results)],  # advice is for those who train it
        imports="\n".join(
            (
                f"import linformers.{'hf' if native else 'linearize'}  # so that transformers knows this type of model",
                f"from transformers import {auto}, AutoTokenizer",
            )
        ),
        auto=auto,
        directory=FINAL,
        source=source_of(run.about),
        data=names_alone(prepared.about["name"]),
        parts=", ".join(
            f"{counts['documents']:,} documents for {part}" for part, counts in prepared.about["parts"].items()
        ),
        vocabulary=prepared.vocab_size,
        settings=[(key, value) for key, value in settings.given().items() if key not in left_out(settings)],
        n=settings.n,
        beyond="; a longer text is cut, or read in windows" if run.task == "classify" else "; a longer one is an error",
        slots=limits_of(settings.given()),
    )
    whole = f"---\n{metadata.to_yaml()}\n---\n\n{text}"
    return whole.encode("utf-8", "replace").decode()  # a file name may contain bytes that are not UTF-8


def source_of(about: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the weights of a run began with, by its name alone; None if all were new."""
    source = about.get("source")
    return source and {"taken": 0, "task": None, **source, "name": Path(source["directory"]).name}


def left_out(settings: Settings) -> set[str]:
    """The settings that a card does not show: paths, and those without effect."""
    unused = {name for name, _ in without_effect(settings.given())} | set(LEFT_OUT)
    return unused if settings.task == "classify" else unused | {"pooling"}  # which a source has for any task


def limits_of(settings: Mapping[str, Any]) -> str:
    """The known weakness of the kind of slots, as a sentence."""
    if settings["attention"] != "linformer":
        return ""
    if settings["open_slots"]:
        return "Opened slots keep the exact keys of all tokens: memory grows in proportion to the text."
    if settings["method"] == "content":
        return "Content slots hold what tokens have in common: exact recall of single tokens far back is weak."
    return "A slot mixes tokens before a query can select among them: exact recall of single tokens far away is weak."


def names_alone(name: str) -> str:
    """The name of the data without its folders, which are paths of one machine."""
    return ", ".join(Path(part).name or part for part in name.split(", "))


def plain(text: str) -> str:
    """Text from files as one line of Markdown, with all markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|#~!])", r"\\\1", " ".join(str(text).split()))
