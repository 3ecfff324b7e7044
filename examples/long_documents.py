"""Classify long documents: the words that tell are few, and may be anywhere.

The documents are made up: thousands of filler words, and a few of a topic among them. Content slots gather words by their features.

    python examples/long_documents.py --words 4096 --k 64 --steps 200
"""

import argparse

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from linformers import LinformerClassifier

FILLER, TOPICS, WORDS_OF_A_TOPIC = 200, 4, 5
VOCABULARY = 1 + FILLER + TOPICS * WORDS_OF_A_TOPIC  # 0 is padding


def documents(count: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``(count, words)``, a mask that is True where a token is real, and the topics."""
    lengths = torch.randint(words // 2, words + 1, (count, 1))
    mask = torch.arange(words) < lengths
    tokens = torch.randint(1, 1 + FILLER, (count, words))
    topics = torch.randint(TOPICS, (count,))
    telling = 1 + FILLER + topics[:, None] * WORDS_OF_A_TOPIC + torch.randint(WORDS_OF_A_TOPIC, (count, words))
    tokens = torch.where(torch.rand(count, words) < 0.02, telling, tokens)
    return tokens * mask, mask, topics


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the accuracy on new documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=1024, help="the longest document")
    parser.add_argument("--k", type=int, default=32, help="slots")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = LinformerClassifier(
        num_tokens=VOCABULARY,
        num_classes=TOPICS,
        input_size=options.words,
        channels=options.channels,
        dim_k=options.k,
        depth=2,
        method="content",
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    for step in range(options.steps):
        tokens, mask, topics = documents(8, options.words)
        loss = cross_entropy(model(tokens, mask=mask), topics)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    tokens, mask, topics = documents(64, options.words)
    with torch.no_grad():
        accuracy = (model.eval()(tokens, mask=mask).argmax(-1) == topics).float().mean().item()
    print(f"{options.words} words in {options.k} slots: {100 * accuracy:.0f} % of 64 new documents right")
    return accuracy


if __name__ == "__main__":
    main()
