"""Laws that must hold on every device, and a short benchmark: what to run first on a new one.

Axes: b batch, n positions, d channels.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linformers.models.language import LinformerLM
from linformers.models.stack import Linformer
from linformers.nn.multihead import LinearMultiheadAttention

METHODS = ("learnable", "convolution", "mean", "max", "no_params", "content")
WIDTH, HEADS, N, K = 32, 4, 64, 16
NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # the largest error, as a share of the size of the output


def usable(device: str) -> torch.device:
    """The device, if torch can compute on it.

    Raises:
        ValueError: if there is no such device, or it cannot be used here.
    """
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise ValueError("it has no values")
        torch.ones(2, device=place).sum().item()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"cannot compute on --device {device}: {str(error).splitlines()[0]}") from None
    return place


def laws(device: torch.device) -> Iterator[tuple[str, str | None]]:
    """The laws, in turn: what each says, and the problem if it does not hold."""
    found: list[tuple[str, Callable[[], str | None]]] = []
    for method in METHODS:
        for causal in (False, True):
            name = f"{method}{', causal' if causal else ''}"
            found.append((f"{name}: as on the CPU, forward and backward", partial(as_on_cpu, device, method, causal)))
    found += [
        ("opened slots: as on the CPU, forward and backward", lambda: as_on_cpu(device, "mean", False, open_slots=2)),
        (
            "opened slots, causal: as on the CPU, forward and backward",
            lambda: as_on_cpu(device, "mean", True, open_slots=2),
        ),
        ("an identity projection gives full attention", lambda: identity(device)),
        ("padded equals trimmed", lambda: padded(device)),
        ("no output depends on a later input", lambda: causality(device)),
        ("step by step equals the parallel pass", lambda: stepwise(device)),
        ("autocast to bfloat16 stays near float32", lambda: autocast(device)),
    ]
    for law, holds in found:
        torch.manual_seed(0)
        try:
            yield law, holds()
        except (RuntimeError, ValueError, TypeError) as error:
            yield law, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def benchmark(device: torch.device, rounds: int) -> Iterator[tuple[int, float, float]]:
    """The length, and the best seconds of a training step with Linformer and with torch's full attention."""
    for n in (512, 2048):
        layer = LinearMultiheadAttention(256, 8, seq_len=n, proj_k=128, batch_first=True, device=device)
        full = nn.MultiheadAttention(256, 8, batch_first=True, device=device)
        x = torch.randn(1, n, 256, device=device)
        times = [math.inf, math.inf]
        for _ in range(rounds + 1):  # the first warms up
            for i, module in enumerate((layer, full)):
                begin = time.perf_counter()
                module(x, x, x, need_weights=False)[0].sum().backward()
                wait(device)
                times[i] = min(times[i], time.perf_counter() - begin)
        yield n, times[0], times[1]


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def difference(actual: Tensor, expected: Tensor, most: float) -> str | None:
    """The problem, if two tensors differ by more than a share of their size."""
    a, b = actual.detach().cpu().double(), expected.detach().cpu().double()  # not every device has float64
    if a.shape != b.shape:
        return f"the shape is {tuple(a.shape)} instead of {tuple(b.shape)}"
    error = float((a - b).abs().max()) / max(1e-9, float(b.abs().max()))
    return None if error <= most else f"off by {error:.1e} of its size"


def as_on_cpu(device: torch.device, method: str, causal: bool, **options: Any) -> str | None:
    """Compare the output and the gradient of the input with those of the CPU in float64, with padding."""
    more: dict[str, Any] = {"causal": True, "block_size": 16} if causal else {}
    layer = LinearMultiheadAttention(
        WIDTH, HEADS, seq_len=N, proj_k=K, method=method, batch_first=True, **more, **options
    )
    x, ignore = torch.randn(2, N - 7, WIDTH), torch.zeros(2, N - 7, dtype=torch.bool)
    ignore[1, 40:] = True
    results = []
    for place, dtype in ((torch.device("cpu"), torch.float64), (device, torch.float32)):
        layer = layer.to(place, dtype)
        given = x.to(place, dtype).requires_grad_()
        out = layer(given, given, given, key_padding_mask=ignore.to(place), need_weights=False)[0]
        out = out.masked_fill(ignore.to(place)[..., None], 0.0)
        (gradient,) = torch.autograd.grad(out.square().sum(), given)
        results.append((out, gradient))
    pairs = zip(*results, strict=True)
    return next((p for e, a in pairs if (p := difference(a, e, NEAR[torch.float32]))), None)


def identity(device: torch.device) -> str | None:
    """Compare with ``nn.MultiheadAttention``."""
    full = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    layer = LinearMultiheadAttention(
        WIDTH, HEADS, batch_first=True, projection=torch.eye(N, device=device), device=device
    )
    layer.load_state_dict(full.state_dict())
    x = torch.randn(2, N, WIDTH, device=device)
    return difference(layer(x, x, x)[0], full(x, x, x)[0], NEAR[torch.float32])


def padded(device: torch.device) -> str | None:
    """Compare a padded sequence with the trimmed one, in a stack."""
    stack = Linformer(N, WIDTH, K, nhead=HEADS, depth=2).to(device).eval()
    x, keep = torch.randn(1, N, WIDTH, device=device), (torch.arange(N, device=device) < 41)[None]
    return difference(stack(x, keep)[:, :41], stack(x[:, :41]), NEAR[torch.float32])


def language_model(device: torch.device) -> LinformerLM:
    """A small causal model."""
    return LinformerLM(97, N, WIDTH, K, nhead=HEADS, depth=2, causal=True, block_size=16).to(device).eval()


def causality(device: torch.device) -> str | None:
    """Look for a gradient towards later positions."""
    stack = language_model(device).body.linformer
    x = torch.randn(1, N, WIDTH, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(stack(x)[:, : N // 2].sum(), x)
    return None if not gradient[:, N // 2 :].any() else "there is a gradient towards later inputs"


@torch.no_grad()
def stepwise(device: torch.device) -> str | None:
    """Compare the logits of single steps with those of the whole text."""
    model, ids = language_model(device), torch.randint(97, (2, N), device=device)
    state = model.new_state(2)
    steps = torch.stack([model.step(ids[:, i], state) for i in range(N)], 1)
    return difference(steps, model(ids), NEAR[torch.float32])


def autocast(device: torch.device) -> str | None:
    """Compare a stack under autocast with itself."""
    stack = Linformer(N, WIDTH, K, nhead=HEADS, depth=2).to(device).eval()
    x = torch.randn(2, N, WIDTH, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        cast = stack(x)
    return difference(cast, stack(x), NEAR[torch.bfloat16])
