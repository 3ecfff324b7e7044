"""Rewrites errors in the names of options: where a model says ``hidden_size=130``, the user typed ``--width 130``."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from linformers.models.options import Shared

# What each setting is called in the configuration of a model, in a stack and in examples.
CALLED = {
    "width": ("hidden_size", "channels"),
    "feedforward": ("intermediate_size", "decoder_ffn_dim"),
    "heads": ("num_attention_heads", "decoder_attention_heads", "nhead"),
    "depth": ("num_hidden_layers", "decoder_layers", "depth"),
    "n": ("max_position_embeddings", "input_size", "max_length"),
    "target_n": ("max_target_positions", "target_length"),
    "k": ("proj_k", "decoder_proj_k", "cross_proj_k", "dim_k", "k"),
    "dropout": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "sharing": ("parameter_sharing", "sharing"),
    "positions": ("position_embedding_type",),
}
SAME = (
    *(field.name for field in fields(Shared)),
    *("vocab_size", "mask_share", "noise_share", "token_dropout", "label_column", "label_separator", "target_column"),
    *("pooling", "noise", "embedding_scale"),
)
RENAMED = {"source": "from"}  # a field cannot be called `from`
SETTINGS = {name: setting for setting, names in CALLED.items() for name in names} | {name: name for name in SAME}


def option(name: str) -> str:
    """What a setting is called on the command line."""
    return "--" + RENAMED.get(name, name).replace("_", "-")


def in_options(text: str, names: Mapping[str, str] = SETTINGS) -> str:
    """A message with names of settings as options.

    ``name=value`` becomes ``--option value`` and ``name must`` becomes ``--option must``. Elsewhere only names with an underscore are
    replaced, because any other may also be an English word.

    Args:
        text: the message.
        names: the setting of each name.
    """
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))

    def replaced(match: re.Match[str]) -> str:
        name, follows = match[1], match[2]
        if not follows and "_" not in name:
            return match[0]
        return option(names[name]) + (" " if follows else "")

    apart = r"[\w/\\.'\"-]"  # inside another name, a path or quotes it is not the setting
    return re.sub(rf"(?<!{apart})({known})(?!{apart})(\s?=\s?|\s(?=must\b))?", replaced, text)


@contextmanager
def spoken(names: Mapping[str, str] = SETTINGS) -> Iterator[None]:
    """Rewrite the ValueErrors of the block, see :func:`in_options`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(in_options(str(error), names)) from error
