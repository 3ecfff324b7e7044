"""Make a trained encoder linear without training it, and measure how near its embeddings stay.

``--model`` is a directory with a BERT, RoBERTa, DistilBERT, ELECTRA or ModernBERT and its tokeniser. Without it a small BERT with random
weights shows the steps; its figures mean nothing.

    python examples/linearize_encoder.py --model my-bert --n 512
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from linformers.data import default_text
from linformers.linearize import linearize


def inputs(directory: str | None, n: int, count: int) -> tuple[nn.Module, Tensor]:
    """The encoder, and passages of n tokens of Python's documentation."""
    if directory is None:
        config = BertConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=max(n, 512),
        )
        return BertModel(config).eval(), torch.randint(config.vocab_size, (count, n))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids: list[int] = []
    for text in default_text():
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count * (n - 2):
            break
    rows = [
        [tokenizer.cls_token_id, *ids[i * (n - 2) : (i + 1) * (n - 2)], tokenizer.sep_token_id] for i in range(count)
    ]
    return AutoModel.from_pretrained(directory).eval(), torch.tensor(rows)


def embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean of the features of each passage."""
    with torch.no_grad():
        return model(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state.mean(1)


def main(arguments: list[str] | None = None) -> dict[int, float]:
    """Return the mean cosine to the original's embeddings for each number of opened slots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a trained encoder")
    parser.add_argument("--n", type=int, default=256, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=8)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    original, tokens = inputs(options.model, options.n, options.passages)
    expected = embed(original, tokens)
    k = options.n // 4
    found = {}
    for opened in (0, 4, 8, k):
        model = copy.deepcopy(original)
        report = linearize(model, k=k, max_len=options.n, open_slots=opened)
        found[opened] = torch.cosine_similarity(embed(model, tokens), expected).mean().item()
        if not opened:
            print(report)
        print(f"k = {k}, {opened} opened slots: cosine {found[opened]:.3f}")
    return found


if __name__ == "__main__":
    main()
