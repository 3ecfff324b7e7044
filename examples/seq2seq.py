"""An encoder-decoder that learns to write a sequence backwards, and how well it does so by greedy search.

The decoder sees every token of the source (``cross_attention="full"``): copying through slots is hard. Encoder and decoder
themselves attend to slots.

    python examples/seq2seq.py --length 32 --k 16 --steps 600
"""

import argparse

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from linformers import LinformerEncDec

START = 0


def pairs(count: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    """Sources of random words, and their targets: a start token, then the source backwards."""
    source = torch.randint(1, words, (count, length))
    return source, torch.cat([torch.full((count, 1), START), source.flip(1)], 1)


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the share of words that are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--words", type=int, default=20, help="size of the vocabulary")
    parser.add_argument("--k", type=int, default=8, help="slots")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = LinformerEncDec(
        num_tokens=options.words,
        enc_input_size=options.length,
        dec_input_size=2 * options.length,
        channels=options.channels,
        dim_k=options.k,
        depth=2,
        dropout=0.0,
        dropout_ff=0.0,
        cross_attention="full",
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.002)
    for step in range(options.steps):
        source, target = pairs(32, options.length, options.words)
        loss = cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    source, target = pairs(32, options.length, options.words)
    written = model.eval().generate(source, target[:, :1], max_new_tokens=options.length)
    right = (written == target).float()[:, 1:].mean().item()
    print("source:  ", *source[0].tolist())
    print("written: ", *written[0, 1:].tolist())
    print(f"{100 * right:.0f} % of the words are right")
    return right


if __name__ == "__main__":
    main()
