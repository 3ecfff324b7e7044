"""Accuracy from the first tokens alone: predict the class that is most frequent in the training part after the same first tokens.

linformers prepare --kind labelled --out listops
python benchmarks/first_tokens.py listops
"""

import sys
from collections import Counter, defaultdict
from itertools import islice

from linformers.data import Examples, load

COUNTED = 60_000


def main() -> None:
    """Print the accuracy on the test part from one, two and three tokens."""
    data = load(sys.argv[1])
    train, test = (Examples(data, part, "classify", max_length=4096) for part in ("train", "test"))
    for size in (1, 2, 3):
        seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for example in islice((train[i] for i in range(len(train))), COUNTED):
            seen[tuple(example["input_ids"][1 : 1 + size])][int(example["labels"])] += 1
        right = 0
        for i in range(len(test)):
            known = seen.get(tuple(test[i]["input_ids"][1 : 1 + size]), Counter({0: 1}))
            right += known.most_common(1)[0][0] == int(test[i]["labels"])
        print(f"{size} tokens: {right / len(test):.1%}")


if __name__ == "__main__":
    main()
