"""Options and inputs of the stack: what contradicts itself is an error that says so."""

import inspect

import pytest
import torch
from model_cases import (
    CAUSAL,
    CHANNELS,
    N,
    inputs,
    make_stack,
)

from linformers import Linformer
from linformers.models.options import StackOptions

# Options


def test_options_agree_with_the_signature():
    signature = inspect.signature(Linformer.__init__)
    options = {name: p for name, p in signature.parameters.items() if name != "self"}
    assert list(options) == list(inspect.signature(StackOptions).parameters)
    documented = inspect.getdoc(Linformer)
    assert all(f"    {name}: " in documented for name in options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"full_attention": True, "attention": "none"}, ["full_attention=True", "attention='none'"]),
        ({"full_attention": True, "attention": "local"}, ["full_attention=True", "attention='local'"]),
        ({"nhead": 3}, ["channels=10", "nhead=3", "dim_d"]),
        ({"one_kv_head": True, "kv_heads": 2}, ["one_kv_head=True", "kv_heads=2"]),
        ({"kv_heads": 3}, ["kv_heads=3", "nhead=2"]),
        ({"rotary": True}, ["rotary=True", "5", "dim_d"]),
        ({"local_window": 3, "causal": True}, ["local_window=3", "causal=True", "block_size"]),
        ({"local_window": 3, "attention": "full"}, ["local_window=3", "attention='full'"]),
        ({"local_window": 3, "full_attention": True}, ["local_window=3", "attention='full'"]),
        ({"local_window": 3, "attention": "none"}, ["local_window=3", "attention='none'"]),
        ({"attention": "local"}, ["attention='local'", "local_window"]),
        ({"block_size": 3}, ["block_size=3", "causal=True"]),
        ({"reversible": True}, ["reversible=True", "norm='post'"]),
        ({"reversible": True, "norm": "pre", "ff_intermediate": 7}, ["reversible=True", "ff_intermediate=7"]),
        ({"reversible": True, "norm": "pre", "checkpoint_level": "C1"}, ["reversible=True", "checkpoint_level='C0'"]),
        ({"ff_intermediate": 7, "include_ff": False}, ["ff_intermediate=7", "include_ff=False"]),
        ({"method": torch.eye(N), "parameter_sharing": "kv"}, ["method", "parameter_sharing='kv'"]),
        ({"method": torch.eye(N), "context_size": 7}, ["method", "context_size=7"]),
        ({"cross_attention": "full"}, ["cross_attention='full'", "context_size"]),
        ({"context_k": 4}, ["context_k=4", "context_size"]),
        ({"cross_attention": "none", "context_size": 7}, ["cross_attention", "'none'"]),
        ({"dim_k": [3], "depth": 2}, ["dim_k lists 1 sizes", "depth of 2"]),
        ({"dim_k": [3, 2], "k_reduce_by_layer": 1}, ["dim_k", "[3, 2]", "k_reduce_by_layer is 1"]),
        ({"local_kernel": 4}, ["local_kernel must be odd", "4"]),
        ({"causal": True, "dim_k": 14, "block_size": 4}, ["block_size = 4", "14 * 4 / 21", "3 and 6"]),
        ({"causal": True, "dim_k": 22}, ["1 <= k <= 21", "k = 22"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_combination_is_an_error_that_names_both_options(options, names):
    with pytest.raises(ValueError) as caught:
        make_stack(options)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "middle"}, "norm must be one of 'pre', 'post'; got 'middle'"),
        ({"checkpoint_level": "C3"}, "checkpoint_level must be one of 'C0', 'C1', 'C2'; got 'C3'"),
        ({"attention": "linear"}, "attention must be one of .*; got 'linear'"),
        ({"parameter_sharing": "all"}, "parameter_sharing must be one of .*; got 'all'"),
        ({"activation": "tanh"}, "activation must be one of 'gelu', 'relu', 'silu'; got 'tanh'"),
        ({"method": "random"}, "method must be one of .*; got 'random'"),
        ({"start": "zeros"}, "start must be one of 'random', 'segments'; got 'zeros'"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"nhead": 0}, "nhead must be at least 1, got 0"),
        ({"dim_k": 0}, "k must be at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"dim_d": 0}, "dim_d must be at least 1, got 0"),
        ({"dim_ff": 0}, "dim_ff must be at least 1, got 0"),
        ({"ff_intermediate": 0}, "ff_intermediate must be at least 1, got 0"),
        ({"w_o_intermediate_dim": 0}, "w_o_intermediate_dim must be at least 1, got 0"),
        ({"context_size": 0}, "context_size must be at least 1, got 0"),
        ({"local_window": -3}, "local_window must not be negative, got -3"),
        ({"local_kernel": -3}, "local_kernel must .*, got -3"),
        ({"attention": "local", "causal": True, "block_size": 0}, "block_size must be at least 1, got 0"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        make_stack(options)


@pytest.mark.parametrize("name", ["input_size", "channels"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Linformer(**({"input_size": 8, "channels": 4, "dim_k": 2} | {name: 0}))


def test_a_mistyped_option_is_an_error():
    with pytest.raises(TypeError, match="dim_kk"):
        Linformer(8, 4, 2, dim_kk=3)
    with pytest.raises(TypeError, match="positional"):
        Linformer(8, 4, 2, 16)


def test_bad_input_is_an_error_that_names_the_argument():
    stack, x = make_stack({}), inputs(2, 5)
    with pytest.raises(ValueError, match=r"\(batch, length, channels=10\), got \(2, 5, 7\)"):
        stack(x[..., :7])
    with pytest.raises(ValueError, match=r"got \(5, 10\)"):
        stack(x[0])
    with pytest.raises(ValueError, match=r"mask must be \(batch, length\) = \(2, 5\), got \(2, 4\)"):
        stack(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be .* got \(2, 5, 5\)"):
        stack(x, torch.ones(2, 5, 5, dtype=torch.bool))
    for kind in (torch.float32, torch.long):
        with pytest.raises(ValueError, match=rf"mask must be bool, .* got {kind}"):
            stack(x, torch.ones(2, 5, dtype=kind))


def test_memory_is_checked():
    stack = make_stack({"context_size": 7, "context_channels": 3})
    context = torch.randn(2, 7, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="pass memory= to forward"):
        stack(inputs(2, 5))
    with pytest.raises(ValueError, match=r"context of 8, .* at most context_size=7"):
        stack.memory(torch.randn(2, 8, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="empty"):
        stack.memory(context[:, :0])
    with pytest.raises(ValueError, match=r"\(batch, length, context_channels=3\), got \(2, 7, 10\)"):
        stack.memory(inputs(2, 7))
    with pytest.raises(ValueError, match=r"mask must be .* = \(2, 7\), got \(2, 6\)"):
        stack.memory(context, torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="no cross-attention"):
        make_stack({}).memory(context)
    with pytest.raises(ValueError, match="no cross-attention"):
        make_stack({})(inputs(2, 5), memory=stack.memory(context))
    assert stack(inputs(2, 5), memory=stack.memory(context)).shape == (2, 5, CHANNELS)
    own = make_stack({"method": torch.randn(N, 5), "dim_k": 5, "context_size": 7, "cross_attention": "full"})
    assert own(inputs(2, 5), memory=own.memory(inputs(2, 7))).shape == (2, 5, CHANNELS)


def test_a_step_without_the_memory_it_needs_is_an_error():
    stack = make_stack(CAUSAL["plain"] | {"context_size": 7})
    with pytest.raises(ValueError, match="memory"):
        stack.step(inputs(1, 1), stack.new_state(1))
