"""A small tokeniser, made here of a few words, and models of its size."""

import saved_cases
from hf_cases import make_config

WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "under",
    "tree",
    "and",
    "then",
    "slept",
    "near",
    "old",
    "house",
    "who",
    "where",
    "did",
]


def make_tokenizer(**options):
    return saved_cases.make_tokenizer(WORDS, model_max_length=20, **options)


def make_text_model(kind, **options):
    sizes = {"vocab_size": len(saved_cases.SPECIAL) + len(WORDS), "pad_token_id": 0}
    return kind(make_config(**(sizes | options))).eval()
