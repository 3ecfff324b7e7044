"""Law 1 of the stack: with identity projections, or a window over everything, it is full attention."""

import pytest
import torch
from comparison import SHARINGS, assert_close, outputs_and_gradients
from model_cases import (
    C,
    N,
    by_name,
    holes,
    inputs,
    make_stack,
)

from linformers.projections.base import Projection

# Law 1: identity projections are full attention


def with_same_weights(options, identity):
    """A stack with full attention, and ``identity``, a stack that must equal it."""
    full = make_stack(options | {"attention": "full"})
    missing, unexpected = identity.load_state_dict(full.state_dict(), strict=False)
    assert all("projection" in name for name in missing)
    assert not unexpected
    return full, dict(full.named_parameters())


def compare_with_full(full, own, stack, x, mask=None):
    results, real = [], 1.0 if mask is None else mask[..., None].double()
    for model in (stack, full):
        parameters = {name: model.get_parameter(name) for name in own}
        results.append(outputs_and_gradients(lambda model=model: [real * model(x, mask)], {"x": x}, parameters))
    assert_close(*results)


BOTH = {
    "plain": {},
    "pre-norm, local kernel": {"norm": "pre", "local_kernel": 3},
    "rotary, one kv head": {"rotary": True, "dim_d": 6, "one_kv_head": True},
    "biases": {"qkv_bias": True},
}


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("sharing", SHARINGS)
def test_identity_matrix_is_full_attention(sharing, options):
    stack = make_stack(options | {"dim_k": N, "parameter_sharing": sharing})
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, Projection):
                module.weight.copy_(torch.eye(N).repeat(1, module.count))
    full, own = with_same_weights(options, stack)
    compare_with_full(full, own, stack, inputs(2, N))


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("length", [1, 4, N])
def test_a_mean_for_each_position_is_full_attention_at_every_length(length, options):
    stack = make_stack(options | {"dim_k": N, "method": "mean"})
    full, own = with_same_weights(options, stack)
    mask = torch.arange(length) < torch.tensor([[length], [max(1, length - 2)]])
    compare_with_full(full, own, stack, inputs(2, length), mask)


@pytest.mark.parametrize("options", **by_name(BOTH))
@pytest.mark.parametrize("sharing", SHARINGS)
def test_identity_in_every_block_is_causal_full_attention(sharing, options):
    causal = options | {"causal": True}
    stack = make_stack(causal | {"dim_k": N, "block_size": C, "parameter_sharing": sharing})
    with torch.no_grad():
        for module in stack.modules():
            if isinstance(module, Projection):
                module.weight.copy_(torch.eye(C).repeat(1, module.count))
    full, own = with_same_weights(causal, stack)
    for length in (N, N - 2, C, 1):
        compare_with_full(full, own, stack, inputs(2, length))
    mask = torch.arange(N) >= torch.tensor([[0], [4]])  # left padding
    compare_with_full(full, own, stack, inputs(2, N), mask)


def test_window_over_everything_is_full_attention():
    stack = make_stack({"attention": "local", "local_window": N})
    full, own = with_same_weights({}, stack)
    compare_with_full(full, own, stack, inputs(2, N - 2), holes(2, N - 2))
