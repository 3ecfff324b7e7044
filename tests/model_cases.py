"""The models that the laws are tested with: every option of the stack once, small, in float64 and without dropout.

Sizes are different primes where the arithmetic of blocks allows it: N longest input, C block, K slots of a causal stack.
"""

from collections.abc import Iterable

import pytest
import torch
from comparison import outputs_and_gradients
from torch import Tensor, nn

from linformers import Linformer, LinformerClassifier, LinformerEncDec, LinformerLM

N, C, R = 21, 3, 2
K = N * R // C
VOCABULARY, CLASSES = 17, 5
POOLINGS = ("mean", "first", "attention")
SIZES = {"nhead": 2, "dim_ff": 11, "depth": 2, "dropout": 0.0, "dropout_ff": 0.0}
CHANNELS = 10

# Options of any stack.
COMMON = {
    "plain": {},
    "pre-norm": {"norm": "pre"},
    "sharing none": {"parameter_sharing": "none"},
    "sharing headwise": {"parameter_sharing": "headwise"},
    "sharing kv": {"parameter_sharing": "kv"},
    "convolution": {"method": "convolution"},
    "convolution, sharing none": {"method": "convolution", "parameter_sharing": "none"},
    "mean": {"method": "mean"},
    "max": {"method": "max"},
    "no_params": {"method": "no_params"},
    "content": {"method": "content"},
    "content, sharing none": {"method": "content", "parameter_sharing": "none", "nhead": 4, "kv_heads": 2, "dim_d": 3},
    "content, C2": {"method": "content", "checkpoint_level": "C2", "rotary": True, "dim_d": 4},
    "content, reversible": {"method": "content", "reversible": True, "norm": "pre", "local_kernel": 3},
    "opened": {"method": "mean", "open_slots": 2},
    "opened, grouped": {"method": "mean", "open_slots": 1, "nhead": 4, "kv_heads": 2, "dim_d": 4, "rotary": True},
    "opened, C2": {"method": "mean", "open_slots": 2, "checkpoint_level": "C2", "norm": "pre"},
    "opened, reversible": {"method": "mean", "open_slots": 2, "reversible": True, "norm": "pre", "local_kernel": 3},
    "one kv head": {"one_kv_head": True, "nhead": 3, "dim_d": 5},
    "grouped heads, sharing none": {"kv_heads": 2, "nhead": 4, "dim_d": 3, "parameter_sharing": "none"},
    "biases": {"qkv_bias": True},
    "local kernel": {"local_kernel": 5},
    "rotary": {"rotary": True, "dim_d": 6},
    "rotary, sharing none": {"rotary": True, "dim_d": 6, "parameter_sharing": "none"},
    "full": {"attention": "full"},
    "full, grouped, local kernel": {"full_attention": True, "one_kv_head": True, "local_kernel": 3, "norm": "pre"},
    "none": {"attention": "none", "local_kernel": 3},
    "no feed-forward": {"include_ff": False},
    "gated": {"gated": True, "activation": "silu"},
    "inner width": {"ff_intermediate": 7, "dim_d": 3, "activation": "relu"},
    "inner width, pre-norm": {"ff_intermediate": 7, "dim_d": 3, "norm": "pre", "local_kernel": 3},
    "second output map": {"w_o_intermediate_dim": 7},
    "segments": {"start": "segments"},
    "C1": {"checkpoint_level": "C1"},
    "C2": {"checkpoint_level": "C2", "kv_heads": 1},
    "reversible": {"reversible": True, "norm": "pre"},
    "reversible C2": {"reversible": True, "norm": "pre", "checkpoint_level": "C2", "local_kernel": 3},
}
ENCODERS = COMMON | {
    "falling k": {"k_reduce_by_layer": 4},
    "list of k, mean": {"dim_k": [7, 3], "method": "mean"},
    "list of k, convolution": {"dim_k": [5, 7], "method": "convolution"},
    "window": {"local_window": 3},
    "window, sharing none": {"local_window": 5, "parameter_sharing": "none", "kv_heads": 1},
    "window, mean": {"local_window": 2, "method": "mean", "norm": "pre"},
    "window, convolution": {"local_window": 5, "method": "convolution", "qkv_bias": True},
    "window, max, rotary, local kernel": {
        "local_window": 3,
        "method": "max",
        "rotary": True,
        "dim_d": 4,
        "local_kernel": 3,
    },
    "window, content": {"local_window": 3, "method": "content"},
    "window, content, sharing none": {"local_window": 2, "method": "content", "parameter_sharing": "none"},
    "window, opened": {"local_window": 2, "method": "mean", "open_slots": 2},
    "window, opened, reversible": {
        "local_window": 2,
        "method": "mean",
        "open_slots": 1,
        "reversible": True,
        "norm": "pre",
    },
    "window, reversible": {"local_window": 3, "reversible": True, "norm": "pre"},
    "window C2": {"local_window": 3, "checkpoint_level": "C2"},
    "local": {"attention": "local", "local_window": 3},
}
CAUSAL = {name: {"causal": True, "block_size": C, "dim_k": K} | options for name, options in COMMON.items()} | {
    "falling k": {"causal": True, "block_size": C, "dim_k": K, "k_reduce_by_layer": 7},
    "list of k, sharing kv": {"causal": True, "block_size": C, "dim_k": [7, 14], "parameter_sharing": "kv"},
    "list of k, mean": {"causal": True, "block_size": C, "dim_k": [7, 14], "method": "mean"},
    "opened, reach": {"causal": True, "block_size": C, "dim_k": K, "method": "mean", "open_slots": 2, "open_reach": 13},
    "even local kernel": {"causal": True, "block_size": C, "dim_k": K, "local_kernel": 4, "norm": "pre"},
    "local": {"causal": True, "block_size": 5, "attention": "local"},
    "local, reversible": {"causal": True, "block_size": 4, "attention": "local", "reversible": True, "norm": "pre"},
    "block of another size": {"causal": True, "block_size": 6, "dim_k": 7},
    "one block": {"causal": True, "dim_k": 5},
}
STACKS = {f"encoder, {name}": options for name, options in ENCODERS.items()} | {
    f"causal, {name}": options for name, options in CAUSAL.items()
}


# These options run the same code in both kinds of stack, or combine options that are tested on their own. Each is tested in one kind, and in
# the other by `make thorough`.
REPEATED = {
    *(
        f"encoder, {name}"
        for name in (
            "sharing headwise",
            "convolution, sharing none",
            "no_params",
            "content, sharing none",
            "content, C2",
            "opened, grouped",
            "opened, reversible",
            "one kv head",
            "biases",
            "rotary, sharing none",
            "full",
            "no feed-forward",
            "inner width",
            "segments",
            "C1",
            "reversible C2",
            "list of k, mean",
            "window, reversible",
            "window C2",
        )
    ),
    *(
        f"causal, {name}"
        for name in (
            "pre-norm",
            "sharing kv",
            "convolution",
            "content",
            "content, reversible",
            "opened",
            "opened, C2",
            "grouped heads, sharing none",
            "rotary",
            "full, grouped, local kernel",
            "gated",
            "inner width, pre-norm",
            "second output map",
            "C2",
            "reversible",
            "list of k, sharing kv",
            "local, reversible",
        )
    ),
}


def by_name(cases: dict, kind: str = "") -> dict:
    """For ``pytest.mark.parametrize``: the values of ``cases``, with their names as ids.

    Args:
        kind: ``"encoder, "`` or ``"causal, "`` for stacks of one kind, whose names do not say it.
    """
    assert set(REPEATED) <= set(STACKS)
    values = [
        pytest.param(case, marks=pytest.mark.thorough) if kind + name in REPEATED else case
        for name, case in cases.items()
    ]
    return {"argvalues": values, "ids": list(cases)}


def in_turn(names: Iterable[str]) -> dict:
    """For slow tests: plain models both without and with a mask, the others alternately; all combinations by ``make thorough``."""
    cases = [
        pytest.param(
            name, masked, marks=[] if name.endswith("plain") or masked == bool(i % 2) else [pytest.mark.thorough]
        )
        for i, name in enumerate(names)
        for masked in (False, True)
    ]
    return {"argnames": ("name", "masked"), "argvalues": cases}


def prepare(model: nn.Module) -> nn.Module:
    """Float64, and no parameter that is only zeros or ones: otherwise an option without any effect would not be noticed."""
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_stack(options: dict, **more) -> Linformer:
    return prepare(Linformer(N, CHANNELS, **({"dim_k": 7} | SIZES | options | more)))


TEXT = {"local_kernel": 3, "dropout_tokens": 0.0, "dim_k": 7} | SIZES
CAUSAL_TEXT = TEXT | {"causal": True, "block_size": C, "dim_k": K}


def make_lm(**options) -> LinformerLM:
    return prepare(LinformerLM(VOCABULARY, N, CHANNELS, **(TEXT | options)))


def make_causal_lm(**options) -> LinformerLM:
    return prepare(LinformerLM(VOCABULARY, N, CHANNELS, **(CAUSAL_TEXT | options)))


def make_classifier(**options) -> LinformerClassifier:
    return prepare(LinformerClassifier(VOCABULARY, CLASSES, N, CHANNELS, **(TEXT | options)))


SOURCE, TARGET, SOURCE_VOCABULARY = 13, 12, 19
SEQ2SEQ = TEXT | {"enc_dim_k": 5, "dec_dim_k": 8, "block_size": 3}


def make_encdec(**options) -> LinformerEncDec:
    """Source of at most 13 tokens of 19, 6 channels; target of at most 12 tokens of 17, 10 channels, in blocks of 3."""
    return prepare(LinformerEncDec(SOURCE_VOCABULARY, SOURCE, 6, VOCABULARY, TARGET, CHANNELS, **(SEQ2SEQ | options)))


def tokens(*shape: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, shape)


def source_ids(*shape: int) -> Tensor:
    return tokens(*shape, vocabulary=SOURCE_VOCABULARY)


def inputs(*shape: int) -> Tensor:
    """``(b, n, channels)``, requiring a gradient."""
    return torch.randn(*shape, CHANNELS, dtype=torch.float64, requires_grad=True)


def holes(b: int, n: int) -> Tensor:
    """A mask with pads in the middle of every row, and at the beginning of the second."""
    keep = torch.rand(b, n) < 0.6
    keep[:, 0] = keep[:, n - 1] = True
    keep[:, n // 2] = False
    if b > 1:
        keep[1, : n // 3] = False
    return keep


def run(model, x, mask=None, places=None, **more) -> dict[str, Tensor]:
    """Output and all gradients of a stack; only the real outputs count, or those at ``places`` ``(b, n)``."""
    places = mask if places is None else places

    def forward():
        y = model(x, mask, **more)
        return (y if places is None else y.masked_fill(~places[..., None], 0.0),)

    own = {"x": x} if x.is_floating_point() else {}
    return outputs_and_gradients(forward, own, dict(model.named_parameters()))


def assert_padding_has_no_influence(model, x, real):
    """The second of two rows ``(2, n, channels)``, padded after ``real`` positions, equals the trimmed one, whatever the padding holds."""
    n = x.shape[1]
    mask = torch.arange(n) < torch.tensor([n, real])[:, None]
    with torch.no_grad():
        out = model(x, mask)
        torch.testing.assert_close(out[1, :real], model(x[1:, :real])[0])
        x[1, real:] = torch.nan
        torch.testing.assert_close(model(x, mask)[mask], out[mask], rtol=0, atol=0)


def changed(ids: Tensor, keep: Tensor, vocabulary: int = VOCABULARY) -> Tensor:
    """Other tokens where ``keep`` is False."""
    return torch.where(keep, ids, (ids + 1 + torch.randint_like(ids, vocabulary - 1)) % vocabulary)
