"""Models and prompts to generate with."""

import torch
from model_cases import make_causal_lm, tokens

from linformers import LinformerLM

VARIANTS = {
    "plain": {},
    "mean": {"method": "mean"},
    "rotary, no mixing": {"positions": "rotary", "dim_d": 6, "local_kernel": 0},
    "full": {"attention": "full"},
    "local": {"attention": "local", "block_size": 4},
    "no attention": {"attention": "none"},
    "tied": {"tie_weights": True, "emb_dim": 7},
}


def make_model(**options) -> LinformerLM:
    return make_causal_lm(**options).eval()


@torch.no_grad()
def naive(model, prompt, count, choose=lambda logits: logits.argmax(-1)):
    """Greedy generation that runs the whole sequence again for each token."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, choose(model(ids)[:, -1])[:, None]], 1)
    return ids


def ragged(side):
    """Prompts of different lengths, padded on one side, and the list of them without padding."""
    rows = [tokens(length) for length in (7, 1, 4)]
    prompt, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = 7 - len(row) if side == "left" else 0
        prompt[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = True
    return prompt, mask, rows
