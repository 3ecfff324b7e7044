"""Every private name of torch, transformers, Keras and TensorBoard that this package reads or calls, and the versions it was checked against.

torch 2.7 to 2.13, transformers 5.22, Keras 3.15, TensorBoard 2.18 to 2.21. None of these has a public equivalent; ``tests/test_private.py`` checks that each still exists and
behaves as expected, and that no other file of the package uses a private name. Overridden methods do not count as use; the last test lists them.
Only torch is imported here; names of transformers and Keras are read from the objects passed in.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._python_dispatch
from torch import Tensor, nn

# torch: quantised and distributed tensors implement their own products.
is_traceable_wrapper_subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp, which ``F.scaled_dot_product_attention`` does not return."""
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*map(side_by_side, (q, k, v)), **options)
    return out, total


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, *more: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`flash`."""
    rows = map(side_by_side, (d_out, q, k, v, out))
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, total, *more, **options)
    return d_q, d_k, d_v


def side_by_side(x: Tensor) -> Tensor:
    """``x``, with channels next to each other in memory: the kernel takes that for granted, and reads other numbers where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_global_hook() -> bool:
    """Whether hooks on all modules are registered, which would see calls that a fast path leaves out."""
    module = torch.nn.modules.module  # torch 2.7 has no function for it
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )


def are_functorch_transforms_active() -> bool:
    """Whether ``torch.func`` transforms run, which cannot see into gradients that are written by hand, and may run many samples as one."""
    return torch._C._are_functorch_transforms_active()


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return any(getattr(module, kind) for kind in HOOKS)


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter that is registered under this name; a parametrised or pruned one is an attribute, but is not registered."""
    return module._parameters.get(name)


def children(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """The modules in a module with their names; ``named_children`` leaves out the second name of a module that has two."""
    return list(module._modules.items())


def leave_out_of_ddp(model: nn.Module, names: list[str]) -> None:
    """Let ``DistributedDataParallel`` neither broadcast these parameters nor reduce their gradients."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def summary_writer(directory: Path) -> Any:
    """torch's ``SummaryWriter``, without TensorFlow.

    torch imports TensorFlow through TensorBoard, which uses its own stub only where TensorFlow is not installed: 6 s and 700 MB at the first line of
    metrics. The module ``notf`` makes it use the stub, which writes the same files.
    """
    switch = "tensorboard.compat.notf"
    before = sys.modules.get(switch)
    sys.modules[switch] = before or ModuleType(switch)
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))
    finally:
        if before is None:
            del sys.modules[switch]


# transformers


def is_initialized(tensor: Tensor) -> bool:
    """Whether ``from_pretrained`` has loaded this tensor; ``_init_weights`` is called for loaded modules, too."""
    return bool(getattr(tensor, "_is_hf_initialized", False))


def attention_name(config: Any) -> Any:
    """The attention implementation of a configuration, or None."""
    return config._attn_implementation


def set_attention_name(config: Any, name: Any) -> None:
    """Set it without the checks of ``set_attn_implementation``, which refuses names for models that it does not know."""
    config._attn_implementation = name


def resize_embeddings(model: Any, size: int, multiple: int | None, mean: bool) -> nn.Embedding:
    """Resize the token embeddings of a model inside another one, whose configuration the outer one changes."""
    return model._resize_token_embeddings(size, multiple, mean)


def load_weights(trainer: Any, checkpoint: str) -> None:
    """Load the weights of a checkpoint, and nothing else, into the model of a Trainer."""
    trainer._load_from_checkpoint(checkpoint)


# Keras: settings of MultiHeadAttention that a subclass with its own ``call`` has to honour, and that have no property.


def in_symbolic_scope() -> bool:
    """Whether a Keras layer is called for shapes only."""
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as found

    return bool(found())


def uses_flash(layer: Any) -> bool:
    """Whether flash attention is requested, by the layer's argument or by the global setting of Keras."""
    return bool(layer._flash_attention)


def uses_gate(layer: Any) -> bool:
    """Whether the output is multiplied with a gate."""
    return bool(layer._use_gate)


def gate(layer: Any, query: Any) -> Any:
    """The gate that multiplies the output."""
    return layer._gate_dense(query)


def weight_dropout(layer: Any, weights: Any, training: bool) -> Any:
    """Dropout of attention weights."""
    return layer._dropout_layer(weights, training=training)


def compute_attention(layer: Any, *inputs: Any, **options: Any) -> Any:
    """Keras' own attention, for the error that it raises."""
    return layer._compute_attention(*inputs, **options)
