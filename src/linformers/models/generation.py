"""Generate tokens one after the other with any model: greedy, sampled, or by beam search.

Axes: b batch, w beams, v tokens of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from linformers.checks import finite, whole
from linformers.limits import at_most
from linformers.nn.state import DecodingState


class Prompted(Protocol):
    """A model and the prompt that it continues."""

    def start(self) -> tuple[Tensor, DecodingState]:
        """Read the prompt: the logits of the next token, ``(b, v)``, and the state after it."""
        ...

    def step(self, tokens: Tensor, state: DecodingState, keep: Tensor | None) -> Tensor:
        """Read the chosen tokens ``(b,)``: the next logits, ``(b, v)``. ``keep`` ``(b,)`` is False for rows that have ended; None if none has."""
        ...


class Generation(TypedDict, total=False):
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits before a token is drawn; 0, the default, takes the likeliest.
        top_k: draw from the ``top_k`` likeliest tokens only.
        top_p: draw from the fewest tokens whose probabilities add up to this.
        num_beams: keep this many continuations and return the likeliest; not with sampling or streaming.
        length_penalty: beams are ranked by their log probability divided by their length to this power.
        eos_token: ends a row.
        pad_token: fills a row that has ended; the end token by default.
        seed: for sampling.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    num_beams: int
    length_penalty: float
    eos_token: int | None
    pad_token: int | None
    seed: int | None


def generate(model: Prompted, prompt: Tensor, max_new_tokens: int, **options: Unpack[Generation]) -> Tensor:
    """Continue a prompt.

    Args:
        model: with this prompt.
        prompt: ``(b, n)``; the continuation is appended to it.
        max_new_tokens: how many to add at most; fewer if all rows end before.

    Returns:
        ``(b, n + new)``.

    Raises:
        ValueError: for values that are not allowed.
    """
    check_options(max_new_tokens, options)
    if options.get("num_beams", 1) > 1:
        return _beam_search(model, prompt, max_new_tokens, options)
    return torch.cat([prompt, torch.stack(list(stream(model, max_new_tokens, **options)), 1)], 1)


def stream(model: Prompted, max_new_tokens: int, **options: Unpack[Generation]) -> Iterator[Tensor]:
    """:func:`generate`, yielding the tokens ``(b,)`` as they are generated; not with beam search."""
    check_options(max_new_tokens, options)
    if options.get("num_beams", 1) > 1:
        raise ValueError(f"num_beams={options['num_beams']} cannot be streamed: the best beam is only known at the end")
    return _tokens(model, max_new_tokens, options)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model that is in training mode into eval mode, and restore the mode of each module afterwards.

    A model in eval mode is left alone, even if some of its modules are not: sampling with dropout is then intended.
    """
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_options(max_new_tokens: int, options: Generation) -> None:
    """Raise a ValueError for values that are not allowed."""
    beams, temperature = options.get("num_beams", 1), options.get("temperature", 0.0)
    top_k, top_p = options.get("top_k"), options.get("top_p")
    whole(max_new_tokens=max_new_tokens, top_k=top_k, num_beams=beams, seed=options.get("seed"))
    whole(eos_token=options.get("eos_token"), pad_token=options.get("pad_token"))
    finite(temperature=temperature, top_p=top_p, length_penalty=options.get("length_penalty"))
    at_most("seed", options.get("seed"), 2**63 - 1)
    unknown = set(options) - set(Generation.__annotations__)
    for wrong, message in (
        (unknown, f"unknown options {sorted(unknown)}; there are {sorted(Generation.__annotations__)}"),
        (max_new_tokens < 1, f"max_new_tokens must be at least 1, got {max_new_tokens}"),
        (temperature < 0, f"temperature must not be negative, got {temperature}"),
        (top_k is not None and top_k < 1, f"top_k must be at least 1, got {top_k}"),
        (top_p is not None and not 0 < top_p <= 1, f"top_p must be above 0 and at most 1, got {top_p}"),
        (temperature == 0 and (top_k or top_p), "top_k and top_p are for drawing; give a temperature above 0"),
        (beams < 1, f"num_beams must be at least 1, got {beams}"),
        (beams > 1 and temperature, f"num_beams={beams} cannot be combined with sampling (temperature={temperature})"),
    ):
        if wrong:
            raise ValueError(message)


def _tokens(model: Prompted, count: int, options: Generation) -> Iterator[Tensor]:
    """Yield at most ``count`` tokens ``(b,)``, greedy or sampled, until all rows have ended."""
    with torch.no_grad():
        logits, state = model.start()
    eos, pad = special_tokens(options, logits.shape[-1])
    random = None if options.get("seed") is None else torch.Generator(logits.device).manual_seed(options["seed"] or 0)
    going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for i in range(count):
        token = choose(logits, options, random)
        if eos is not None:
            token = torch.where(going, token, eos if pad is None else pad)
            going = going & (token != eos)
        yield token
        if i + 1 == count or not going.any():
            return
        with torch.no_grad():
            logits = model.step(token, state, None if eos is None else going)


def special_tokens(options: Generation, vocabulary: int) -> tuple[int | None, int | None]:
    """The end token and the pad token.

    Raises:
        ValueError: if one is not in the vocabulary.
    """
    eos, pad = options.get("eos_token"), options.get("pad_token")
    for name, token in (("eos_token", eos), ("pad_token", pad)):
        if token is not None and not 0 <= token < vocabulary:
            raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, got {token}")
    return eos, pad


COLDEST = 1e-30  # a temperature below it would be zero in float32


def choose(logits: Tensor, options: Generation, random: torch.Generator | None = None) -> Tensor:
    """One token a row from ``(b, v)``: the likeliest, or a sampled one."""
    temperature, top_k, top_p = options.get("temperature", 0.0), options.get("top_k"), options.get("top_p")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / max(temperature, COLDEST)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(descending=True)
        share = ordered.softmax(-1)
        beyond = share.cumsum(-1) - share >= top_p  # the token that crosses top_p is kept
        logits = logits.masked_fill(beyond.gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=random).squeeze(-1)


@torch.no_grad()
def _beam_search(model: Prompted, prompt: Tensor, count: int, options: Generation) -> Tensor:
    """Keep the ``num_beams`` likeliest continuations of each row, ended ones included, and return the best."""
    beams, penalty = options.get("num_beams", 1), options.get("length_penalty", 1.0)
    logits, state = model.start()
    b, v = logits.shape
    eos, pad = special_tokens(options, v)
    device = logits.device
    first = torch.arange(b, device=device).repeat_interleave(beams)
    state.reorder(first)
    logits = logits[first]
    # All beams of a row start equal: only the first may be chosen in the first step.
    score = torch.full((b, beams), -torch.inf, device=device)
    score[:, 0] = 0.0
    length = torch.zeros(b, beams, device=device)
    going = torch.ones(b, beams, dtype=torch.bool, device=device)
    chosen = torch.zeros(b, beams, 0, dtype=prompt.dtype, device=device)
    filler = eos if pad is None else pad
    for i in range(count):
        total = score[..., None] + logits.float().log_softmax(-1).view(b, beams, v)
        if filler is not None:  # an ended beam continues with a filler at no cost
            ended = torch.full_like(total, -torch.inf)
            ended[..., filler] = score
            total = torch.where(going[..., None], total, ended)
        candidate_length = (length + going).clamp(min=1)[..., None]
        ranked = (total / candidate_length**penalty).flatten(1)
        best = ranked.topk(beams).indices  # (b, w)
        origin, token = best // v, best % v
        score = total.flatten(1).gather(1, best)
        length = candidate_length.squeeze(-1).gather(1, origin)
        going = going.gather(1, origin)
        chosen = torch.cat([chosen.gather(1, origin[..., None].expand(-1, -1, i)), token[..., None]], 2)
        if eos is not None:
            going = going & (token != eos)
        if i + 1 == count or not going.any():
            break
        rows = (torch.arange(b, device=device)[:, None] * beams + origin).flatten()
        state.reorder(rows)
        logits = model.step(token.flatten(), state, going.flatten() if eos is not None else None)
    winner = (score / length.clamp(min=1) ** penalty).argmax(1)
    return torch.cat([prompt, chosen[torch.arange(b, device=device), winner]], 1)
