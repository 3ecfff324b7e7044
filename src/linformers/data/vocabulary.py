"""Tokenisers: trained on a sample of the text, or taken from a directory; all are transformers' fast tokenisers."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from linformers import limits
from linformers.extras import install

Method = Literal["bpe", "wordpiece", "words", "bytes"]
SIZES: dict[str, int] = {"bpe": 8192, "wordpiece": 8192, "words": 20_000, "bytes": 261}
SPECIAL = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]
PAD, BEGIN, END, MASK, UNKNOWN = range(5)


def train_tokenizer(
    method: Method, texts: Iterable[str], vocab_size: int | None = None, lowercase: bool = False
) -> Any:
    """Train a tokeniser with the special tokens ``<pad> <s> </s> <mask> <unk>``, numbered from 0.

    Args:
        method: ``"bpe"``, byte-level pairs, for any text; ``"wordpiece"``, as BERT's; ``"words"``, split at spaces;
            ``"bytes"``, without training.
        texts: the training texts.
        vocab_size: the most tokens, with the special ones; None means 8,192, or 20,000 words. 261 for bytes, always.
        lowercase: make everything lower case first.

    Raises:
        ValueError: for a vocabulary that is too small.
    """
    need_packages()
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    size = check_size(method, vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": SPECIAL, "show_progress": False}
    match method:
        case "bytes":
            vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
            tokenizer = Tokenizer(models.BPE(vocabulary, []))
            trainer: Any = None
        case "bpe":
            tokenizer = Tokenizer(models.BPE())
            trainer = trainers.BpeTrainer(initial_alphabet=alphabet, min_frequency=2, **options)
        case "wordpiece":
            tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=100))
            trainer = trainers.WordPieceTrainer(limit_alphabet=max(1, size * 3 // 4), min_frequency=2, **options)
        case "words":
            tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
            trainer = trainers.WordLevelTrainer(**options)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    if method in ("bpe", "bytes"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=method == "bpe")
        tokenizer.decoder = decoders.ByteLevel()
    elif method == "wordpiece":
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if trainer is not None:
        tokenizer.train_from_iterator(map(without_special, texts), trainer)
    return finish(tokenizer)


def need_packages() -> None:
    """Raise an ImportError that says what to install."""
    missing = [name for name in ("tokenizers", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"data needs more packages ({', '.join(missing)}): {install('hf')}")


def check_size(method: str, vocab_size: int | None) -> int:
    """Check the size of a new vocabulary.

    Raises:
        ValueError: if that is too few or too many.
    """
    size = SIZES[method] if vocab_size is None else vocab_size
    smallest = SIZES["bytes"] if method in ("bpe", "bytes") else len(SPECIAL) + 1
    if method == "bytes" and size != smallest:
        raise ValueError(f"a vocabulary of bytes has {smallest} tokens, got vocab_size={size}; leave it out")
    if size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} for {method!r}, got {size}")
    limits.at_most("vocab_size", size, limits.VOCABULARY)
    return size


def without_special(text: str) -> str:
    """The text without the names of special tokens, which a trainer would add a second time."""
    for name in SPECIAL:
        if name in text:
            text = text.replace(name, " ")
    return text


def finish(tokenizer: Any) -> Any:
    """Add the special tokens, and a template that begins a text with ``<s>`` and ends it with ``</s>``."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    # A mask stands for a word with the space before it, as RoBERTa's does.
    tokenizer.add_special_tokens([AddedToken(token, lstrip=token == "<mask>", normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", BEGIN), ("</s>", END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        mask_token=AddedToken("<mask>", lstrip=True, normalized=False, special=True),
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(directory: Path) -> Any:
    """The tokeniser of a directory; nothing is downloaded.

    Raises:
        ValueError: if there is none, or it is not one of transformers' fast tokenisers.
    """
    need_packages()
    from linformers.pretrained import load as pretrained

    if not directory.is_dir():
        raise ValueError(
            f"tokenizer must be one of {', '.join(map(repr, SIZES))} or a directory with a tokeniser; got {str(directory)!r}"
        )
    try:
        tokenizer = pretrained.load_tokenizer(directory)
    except (ValueError, OSError) as error:
        raise ValueError(f"{directory} has no readable tokeniser: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the tokeniser of {directory} has no tokenizer.json; save it as a fast tokeniser first")
    return tokenizer


def table_size(tokenizer: Any) -> int:
    """The number of rows of an embedding for its tokens: the largest id plus 1, because some tokenisers skip ids."""
    return int(max(tokenizer.get_vocab().values())) + 1


class Encoder:
    """Encodes batches of texts, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # "<s>" in a text is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = table_size(tokenizer)
        self.unknown: int | None = tokenizer.unk_token_id
        special = np.zeros(self.size, bool)
        special[[i for i in tokenizer.all_special_ids if i != self.unknown]] = True
        self._special = special

    def __call__(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """The tokens of each text."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        rows = [np.array(one.ids, np.int64) for one in found]
        return [without_marks(ids, self._special[ids], self.unknown) for ids in rows]


def without_marks(ids: NDArray[np.int64], marked: NDArray[np.bool_], unknown: int | None) -> NDArray[np.int64]:
    """Remove special tokens that came from the text: a tokeniser may have learned to merge the letters of their names.

    Args:
        ids: the tokens of a text.
        marked: which of them are special.
        unknown: the token that replaces them; None leaves them out.
    """
    if not marked.any():
        return ids
    return ids[~marked] if unknown is None else np.where(marked, unknown, ids)
