"""Errors in the words of the command: where a model says ``hidden_size=130``, the user typed ``--width 130``."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# What settings are called in the configuration of a model, in a stack and in examples.
SETTINGS = {
    **{
        "hidden_size": "width",
        "channels": "width",
        "intermediate_size": "feedforward",
        "decoder_ffn_dim": "feedforward",
    },
    **{"num_attention_heads": "heads", "decoder_attention_heads": "heads", "nhead": "heads"},
    **{"num_hidden_layers": "depth", "decoder_layers": "depth", "depth": "depth"},
    **{"max_position_embeddings": "n", "input_size": "n", "max_length": "n"},
    **{"max_target_positions": "target_n", "target_length": "target_n"},
    **{"proj_k": "k", "decoder_proj_k": "k", "cross_proj_k": "k", "dim_k": "k", "k": "k"},
    **{"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "dropout", "parameter_sharing": "sharing"},
    **{"position_embedding_type": "positions", "vocab_size": "vocab_size", "block_size": "block_size"},
    **{"local_window": "local_window", "local_kernel": "local_kernel", "cross_attention": "cross_attention"},
    **{"mask_share": "mask_share", "noise_share": "noise_share", "label_column": "label_column"},
    **{"target_column": "target_column", "attention": "attention", "sharing": "sharing", "method": "method"},
    **{"start": "start", "norm": "norm", "pooling": "pooling", "noise": "noise"},
}


def option(name: str) -> str:
    """What a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def in_options(text: str, names: Mapping[str, str] = SETTINGS) -> str:
    """A message with names of settings as options.

    ``name=value`` becomes ``--option value`` and ``name must`` becomes ``--option must``. A name with an underscore is replaced wherever it
    is; any other is a word of the language, too.

    Args:
        text: the message.
        names: what each name is called among the settings.
    """
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))

    def replaced(match: re.Match[str]) -> str:
        name, follows = match[1], match[2]
        if not follows and "_" not in name:
            return match[0]
        return option(names[name]) + (" " if follows else "")

    apart = r"[\w/\\.'\"-]"  # inside another name, a path or quotes it is something else
    return re.sub(rf"(?<!{apart})({known})(?!{apart})(\s?=\s?|\s(?=must\b))?", replaced, text)


@contextmanager
def spoken(names: Mapping[str, str] = SETTINGS) -> Iterator[None]:
    """Let the ValueErrors of the block speak of options, see :func:`in_options`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(in_options(str(error), names)) from error
