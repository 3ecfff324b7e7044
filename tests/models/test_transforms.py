"""``torch.func``: gradients of every sample by ``vmap``, where no code may depend on a value."""

import pytest
import torch
from model_cases import CAUSAL, STACKS, by_name, holes, inputs, make_lm, make_stack, tokens
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = ("content", "window, content, sharing none", "opened", "window, opened", "plain", "mean")


@pytest.mark.parametrize(
    "options",
    **by_name(
        {name: STACKS[f"encoder, {name}"] for name in CASES}
        | {f"causal {name}": CAUSAL[name] for name in ("content, sharing none", "opened, grouped", "plain")}
    ),
)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_every_sample(options, masked):
    model, x = make_stack(options), inputs(3, 17)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    keep = holes(3, 17) if masked else torch.ones(3, 17, dtype=torch.bool)

    def loss(parameters, x, keep):
        out = functional_call(model, parameters, (x[None], keep[None] if masked else None))[0]
        return out.masked_fill(~keep[:, None], 0.0).sin().sum()

    with sdpa_kernel(SDPBackend.MATH):  # vmap warns that it runs other kernels one sample after the other
        found = vmap(grad(loss), (None, 0, 0))(parameters, x, keep)
        for i in range(3):
            expected = grad(loss)(parameters, x[i], keep[i])
            torch.testing.assert_close({name: g[i] for name, g in found.items()}, expected)


def test_tokens_of_every_sample():
    model, ids = make_lm(), tokens(3, 11)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(vmap(lambda row: model(row[None])[0])(ids), model(ids))
