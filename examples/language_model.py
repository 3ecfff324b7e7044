"""Train a small language model on a text, byte by byte, and stream its continuation of a prompt.

Without ``--text`` it reads Python's own documentation. The decoding state has the same size however long the text gets.

    python examples/language_model.py --text book.txt --steps 500 --prompt "It was"
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from linformers import LinformerLM
from linformers.projections import projection_parameters


def read(path: Path | None) -> torch.Tensor:
    """The bytes of a text, as numbers from 0 to 255."""
    if path is not None:
        text = path.read_bytes()
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.tensor(list(text))


def main(arguments: list[str] | None = None) -> str:
    """Train, print the continuation as it is generated, and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--n", type=int, default=512, help="bytes of an example")
    parser.add_argument("--k", type=int, default=128, help="slots")
    parser.add_argument("--channels", type=int, default=96)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompt", default="The for statement ")
    parser.add_argument("--new", type=int, default=200, help="bytes to generate")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = read(options.text)
    if len(text) <= options.n:
        raise SystemExit(f"the text has {len(text)} bytes, and an example needs {options.n + 1}; give a smaller --n")
    model = LinformerLM(
        num_tokens=256,
        input_size=options.n,
        channels=options.channels,
        dim_k=options.k,
        depth=2,
        causal=True,
        dropout=0.0,
        dropout_ff=0.0,
    )
    slow = set(projection_parameters(model))  # updates to a column of E add up over the positions of a block
    fast = [p for p in model.parameters() if p not in slow]
    optimizer = torch.optim.AdamW([{"params": fast}, {"params": list(slow), "lr": 0.0003}], 0.003)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.n, (4,)).tolist()
        rows = torch.stack([text[i : i + options.n + 1] for i in starts])
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits a byte")
    prompt = torch.tensor([list(options.prompt.encode())])
    print(options.prompt, end="")
    written = bytearray()
    new = min(options.new, options.n - prompt.shape[1])
    for token in model.eval().stream(prompt, max_new_tokens=new, temperature=0.7, top_p=0.9, seed=0):
        written.append(token.item())
        print(bytes([token.item()]).decode(errors="replace"), end="", flush=True)
    print()
    return written.decode(errors="replace")


if __name__ == "__main__":
    main()
