"""Small saved things to look at: models with a tokeniser of a few words, and runs without a model.

Processes that only write runs import this: what takes long to import is imported where it is used.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(26)]
LAYERS, HEADS = 3, 2
# Names that a run may have: formulas, markup, control characters, bytes that are no text, other scripts.
ODD = [
    "x$\\foo$",
    "$^{_",
    "\\frac",
    "_hidden",
    "<b>&amp;'\"",
    "a\x01\udcffb",
    "日本語 🙂",
    "line\nbreak",
    "x" * 300,
    "",
    "#222222",
]


def make_tokenizer(words: Sequence[str] = WORDS, **options: Any) -> Any:
    import tokenizers
    import transformers

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        **options,
    )


def save_bert(directory: Path) -> Path:
    import transformers

    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=16,
        max_position_embeddings=20,
        initializer_range=2.0,
    )
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_own(directory: Path, kind: str = "MaskedLM", **options: Any) -> Path:
    from linformers import hf

    config = hf.LinformerConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=16,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=False,
        **options,
    )
    getattr(hf, f"LinformerFor{kind}")(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_text(path: Path, words: int = 400) -> Path:
    path.write_text(" ".join(WORDS[(7 * i * i + i // 9) % 26] for i in range(words)), encoding="utf-8")
    return path


def learned(end: float, seed: int = 0, steps: int = 100) -> list[dict[str, Any]]:
    """The lines of a run that ends near a loss of ``end``."""
    rows: list[dict[str, Any]] = []
    for step in range(0, steps + 1, steps // 5):
        loss = end + (5 - end) * math.exp(-step / 30) + 0.01 * seed
        for part, value in (("train", loss - 0.1), ("validation", loss)):
            scores = {"loss": value, "perplexity": math.exp(value), "accuracy": 1 / (1 + value)}
            rows.append({"step": step, "epoch": step / 50, "part": part, "seconds": step / 10, **scores})
    return rows


def save_run(directory: Path, end: float = 3.0, *, seed: int = 0, finished: bool = True, **settings: Any) -> Path:
    """A run directory without weights, as `linformers train` and `linformers evaluate` leave it."""
    directory.mkdir(parents=True)
    config = {"settings": {"task": "mlm", "attention": "linformer", "n": 16, "k": 4, "seed": seed, **settings}}
    (directory / "config.json").write_text(json.dumps(config))
    rows = learned(end, seed)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        last = rows[-1]
        results = {
            "part": "test",
            **{key: last[key] for key in ("loss", "perplexity", "accuracy")},
            "baseline": {"loss": 4.5, "perplexity": math.exp(4.5), "accuracy": 0.05},
            "parameters": 12345,
            "tokens_per_second": 1000.0,
            "peak_memory_mb": 300.0,
            "seconds": 10.0,
            "examples": [],
        }
        (directory / "results.json").write_text(json.dumps(results))
    return directory
