"""The queries, keys, values and inputs of a Hugging Face encoder's attention, recorded while it runs, for calibration.

Axes: b batch, h heads, n positions, d channels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from linformers.linearize.calibrate import Batch, Sample, run
from linformers.linearize.encoders import exact, padding_mask, rescaled
from linformers.private import attention_name, set_attention_name

CAPTURE = "linformers-capture"

_captured: tuple[nn.Module, list[Sample]] | None = None


def capture_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of the original, which also records the inputs of one module; see :func:`capturing`."""
    query = rescaled(query, scaling)
    if _captured is not None and module is _captured[0]:
        _captured[1].append(Sample(query.detach(), key.detach(), value.detach(), attention_mask))
    return exact(query, key, value, attention_mask, dropout, sliding_window, False)[0].transpose(1, 2), None


@contextmanager
def capturing(
    model: PreTrainedModel, runner: nn.Module
) -> Iterator[Callable[[nn.Module, Sequence[Batch]], list[Sample]]]:
    """Run the original model and record its queries, keys and values, and its input, one attention module at a time.

    Args:
        runner: the module that is called with the batches: ``model`` itself, or a module around it.
    """
    before = attention_name(model.config)

    def samples(module: nn.Module, batches: Sequence[Batch]) -> list[Sample]:
        global _captured
        _captured = (module, [])
        inputs: list[Tensor] = []

        def keep_input(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        handle = module.register_forward_pre_hook(keep_input, with_kwargs=True)
        try:
            with torch.no_grad():
                for batch in batches:
                    run(runner, batch)
            return [sample._replace(features=x) for sample, x in zip(_captured[1], inputs, strict=True)]
        finally:
            handle.remove()
            _captured = None

    try:
        set_attention_name(model.config, CAPTURE)
        yield samples
    finally:
        set_attention_name(model.config, before)


AttentionInterface.register(CAPTURE, capture_attention)
AttentionMaskInterface.register(CAPTURE, padding_mask)
