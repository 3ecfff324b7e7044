"""What slots hold: the tokens that chose them or that they stand for, and how many are alive."""

import pytest
import torch

from linformers import Linformer, LinformerEncDec, LinformerLM
from linformers.models.held import Held, Watch, are_alive, content_stacks, opened_keys, slots_alive

K, BLOCK = 5, 3


def watched(model, *inputs):
    """What the slots of a model hold while it reads these inputs."""
    stacks = {name or "stack": m for name, m in model.named_modules() if isinstance(m, Linformer)}
    with torch.no_grad(), Watch(stacks) as watch:
        model.eval()(*inputs)
    assert not any(module._forward_pre_hooks for module in model.modules())
    return watch


@pytest.mark.parametrize(("sharing", "heads"), [("none", 2), ("kv", 1), ("layerwise", 1)])
def test_every_token_is_in_the_slots_once(sharing, heads):
    model = Linformer(None, 6, K, nhead=2, depth=2, method="content", parameter_sharing=sharing)
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    layers = watched(model, torch.randn(2, 11, 6), mask).held["stack"]
    assert len(layers) == 2
    for layer in layers:
        torch.testing.assert_close(layer.shares.sum(-1), mask[:, None].expand(2, heads, 11).float())
        torch.testing.assert_close(layer.tokens, layer.shares.sum(2))


@pytest.mark.parametrize("left", [False, True])
def test_the_last_query_of_a_causal_model_sees_its_last_blocks_exactly(left):
    model = LinformerLM(17, None, 8, K, nhead=2, depth=2, causal=True, method="content", block_size=BLOCK)
    real = torch.tensor([14, 11, 5])
    places = torch.arange(14)
    mask = places >= 14 - real[:, None] if left else places < real[:, None]
    layers = watched(model, torch.randint(17, (3, 14)), mask).held["body.linformer"]
    # Positions 0 to 13 are in blocks 0 to 4: the last query sees those of 3 and 4 exactly. 11 of them end in block 3, 5 in block 1.
    finished = torch.tensor([9, 6, 0])
    first = 14 - real if left else torch.zeros(3, dtype=torch.long)
    for layer in layers:
        expected = (places >= first[:, None]) & (places < (first + finished)[:, None])
        assert torch.equal(layer.counted, expected)
        torch.testing.assert_close(layer.tokens.sum(-1), finished[:, None].float().expand(3, layer.tokens.shape[1]))
        torch.testing.assert_close(layer.shares.sum(-1), mask[:, None].float().expand(3, layer.shares.shape[1], 14))


def test_slots_of_a_context_hold_its_tokens():
    model = LinformerEncDec(
        num_tokens=17, input_size=16, channels=8, dim_k=K, nhead=2, method="content", dec_cross_attention="linformer"
    )
    found = watched(model, torch.randint(17, (1, 13)), torch.randint(17, (1, 9))).context["decoder.body.linformer"]
    for layer in found:
        torch.testing.assert_close(layer.tokens.sum(-1), torch.full(layer.tokens.shape[:2], 13.0))


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"local_window": 0}, [4, 3, 0]), ({"causal": True, "block_size": 4}, [2, 2, 2, 1, 0, 0])],
    ids=["both ways", "causal"],
)
def test_slots_of_segments_hold_their_positions(options, tokens):
    k = 6 if "causal" in options else 3
    model = Linformer(12, 8, k, nhead=2, depth=1, method="mean", open_slots=1, **options)
    (layer,) = watched(model, torch.randn(1, 7, 8)).held["stack"]
    assert layer.tokens[0, 0].tolist() == tokens
    assert layer.shares is None


def test_exact_keys_of_opened_slots():
    held = Held(torch.tensor([[[4, 3, 2]]]), beside=torch.tensor([[0, 1]]))
    choice = torch.tensor([[[[0, 2], [1, -1]]]])
    assert opened_keys(held, choice).tolist() == [[[6, 4]]]
    assert opened_keys(held._replace(beside=None), choice).tolist() == [[[6, 3]]]


def test_alive_is_half_of_an_even_share():
    assert are_alive(torch.tensor([8.0, 2.0, 1.9, 4.1])).tolist() == [True, True, False, True]
    shares = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.4, 0.0]]).expand(1, 1, 2, 3)
    one = Held(shares.sum(2), shares)  # 1.6, 0.4 and 0 of 2 tokens: an even share is 0.67
    assert slots_alive({"a": [one, None], "b": [Held(torch.ones(1, 1, 3))]}) == pytest.approx(2 / 3)
    assert slots_alive({"a": [None], "b": []}) is None


def test_only_stacks_with_content_slots_are_named():
    model = torch.nn.ModuleDict(
        {"a": Linformer(None, 6, 2, nhead=2, method="content"), "b": Linformer(5, 6, 2, nhead=2)}
    )
    assert set(content_stacks(model)) == {"a"}
