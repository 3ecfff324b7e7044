"""Load models and tokenisers from directories: nothing is downloaded, no code of the directory is run, and damage is a ``ValueError``."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linformers import limits
from linformers.files.checked import (
    an_object,
    any_of,
    each,
    fields,
    flag,
    inner_path,
    kind_of,
    maybe,
    named,
    nothing,
    read_object,
    reading,
    refused,
    text,
    whole,
)

# Without trust_remote_code=False, transformers asks on the terminal whether to run code that a configuration names.
OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


ADVICE = "save it again, or restore it"


def check_directory(directory: Path) -> None:
    """Raise a ValueError for a directory with pipes or devices, or with JSON files that are damaged."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            raise ValueError(f"{entry.path} cannot be read: {error.strerror}; remove it, or restore it") from None
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{entry.path} is {kind_of(mode)}, not a regular file; remove it")
        if entry.name in CHECKED and stat.S_ISREG(mode):
            read_object(Path(entry.path), *CHECKED[entry.name], advice=ADVICE)


def of_this_machine(value: Any, place: str) -> None:
    """Raise a ValueError for an attention function of the hub: for a name with a slash, transformers would fetch a repository and run its code."""
    names = value.values() if isinstance(value, dict) else [value]
    if any(isinstance(name, str) and "/" in name for name in names):
        raise refused(value, place, "the name of an installed attention function; code from the hub is not run")


def beside(value: Any, place: str) -> None:
    """Raise a ValueError for anything but the name of a file in the same directory."""
    inner_path(value, place)
    if "/" in value:
        raise refused(value, place, "the name of a file in the same directory")


OF_LINEARIZED = fields(  # of the object `linformers` in the configuration of a linearised model
    {
        **{"max_len": whole(1), "slots": each(whole(), least=1), "method": text(), "sharing": text()},
        "local_window": whole(),
    },
    {"open_slots": whole(), "assigned_by": text()},
)


OF_CONFIG = {
    "model_type": text(),
    "architectures": maybe(each(text())),
    "id2label": maybe(an_object),
    "label2id": maybe(an_object),
    "num_labels": whole(1, limits.VOCABULARY),
    "problem_type": maybe(text()),
    "dtype": maybe(text()),
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "return_dict", "output_hidden_states"), maybe(flag)),
    "output_attentions": maybe(flag),
    "linformers": maybe(OF_LINEARIZED),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), of_this_machine),
}


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


# transformers joins these names to the directory as they are.
INDICES: dict[str, tuple[Any, Any]] = dict.fromkeys(
    ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ({"weight_map": named(beside)}, {"metadata": maybe(an_object)}),
)
CHECKED: dict[str, tuple[Any, Any]] = {
    **INDICES,
    "config.json": ({}, OF_CONFIG),
    "generation_config.json": ({}, dict.fromkeys(TOKENS, any_of(nothing, whole(), each(whole())))),
    "tokenizer_config.json": ({}, {"tokenizer_class": maybe(text())}),
    "tokenizer.json": ({"model": an_object}, {"added_tokens": maybe(each(fields({})))}),
    "special_tokens_map.json": ({}, {}),
}


def check_index(directory: Path) -> None:
    """Raise a ValueError for weights in several files whose index is damaged, or names files elsewhere."""
    for name, checks in INDICES.items():
        if (directory / name).exists():
            read_object(directory / name, *checks, advice=ADVICE)


def load_config(directory: Path) -> Any:
    """The configuration of a saved model, of any type that transformers or this project knows.

    Raises:
        ValueError: if it is damaged, or of a type that needs code of the directory.
        OSError: if it cannot be read.
    """
    import transformers

    check_directory(directory)
    with reading(f"the configuration of {directory}", ADVICE):
        return transformers.AutoConfig.from_pretrained(directory, **OPTIONS)


def saved_class(names: Sequence[str], *modules: Any) -> Any:
    """The first class in one of these modules that a configuration names (``architectures``), or None."""
    found = (getattr(module, name, None) for name in names for module in modules)
    return next((kind for kind in found if hasattr(kind, "from_pretrained")), None)


def load_model(kind: Any, directory: Path, **options: Any) -> Any:
    """Load the model of a directory; every loader of saved models calls this.

    Args:
        kind: its class, or an Auto class.
        directory: what ``save_pretrained`` wrote.
        options: for ``from_pretrained``.

    Raises:
        ValueError: if something is damaged, is a pickle with more than tensors in it, or is not what the configuration says.
        OSError: if it cannot be read.
    """
    check_directory(directory)
    with reading(f"the model of {directory}", ADVICE):
        known = getattr(kind, "config_class", None)
        config = options.get("config") or (
            load_config(directory) if known is None else known.from_pretrained(directory, **OPTIONS)
        )
        limits.check_configuration(config, limits.machine_memory())
        with quiet():
            return kind.from_pretrained(directory, **OPTIONS, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the progress bars of transformers inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(directory: Path) -> Any:
    """The tokeniser of a directory.

    Raises:
        ValueError: if there is none that can be read without code of the directory.
        OSError: if it cannot be read.
    """
    import transformers

    check_directory(directory)
    with reading(f"the tokeniser of {directory}", ADVICE):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **OPTIONS)
        # Most of its files are not read before the first text.
        tokenizer.decode(tokenizer.encode("a b", verbose=False))
        tokenizer("a b", truncation=True, max_length=8)
    # Without files, transformers makes one of the type of the model that knows its special tokens alone.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"the files of the tokeniser are missing from {directory}; copy them there")
    return tokenizer
