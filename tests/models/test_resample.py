"""Other lengths and other numbers of slots for whole layers and models; ``tests/projections`` has the projections."""

import pytest
import torch

from linformers import (
    LinearMultiheadAttention,
    Linformer,
    LinformerClassifier,
    LinformerEncDec,
    LinformerLM,
    make_projection,
    resample,
)


def test_twice_the_slots_give_the_same_outputs() -> None:
    model = LinformerLM(17, 12, 8, 3, nhead=2, depth=2).double().eval()
    tokens = torch.randint(17, (2, 11))
    before = model(tokens)
    resample(model, k=6, noise=0.0)
    torch.testing.assert_close(model(tokens), before)
    _, weights = model(tokens, need_weights=True)
    assert [w.shape[-1] for w in weights] == [6, 6]


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_a_longer_model_takes_longer_inputs(sharing: str, positions: str) -> None:
    model = LinformerLM(17, 12, 8, 3, nhead=2, depth=2, parameter_sharing=sharing, positions=positions)
    with pytest.raises(ValueError, match="input_size=12"):
        model(torch.randint(17, (1, 24)))
    resample(model, max_len=24)
    assert model(torch.randint(17, (1, 24))).shape == (1, 24, 17)
    with pytest.raises(ValueError, match="input_size=24"):
        model(torch.randint(17, (1, 25)))
    model(torch.randint(17, (1, 24))).sum().backward()


def test_a_longer_causal_model_keeps_its_blocks_and_its_outputs() -> None:
    model = LinformerLM(17, 16, 8, 8, nhead=2, depth=2, causal=True, block_size=4).double().eval()
    tokens = torch.randint(17, (2, 15))
    before = model(tokens)
    resample(model, max_len=32)
    torch.testing.assert_close(model(tokens), before)
    longer = torch.randint(17, (1, 31))
    _, weights = model(longer, need_weights=True)
    assert weights[0].shape == (1, 2, 31, 16 + 8)
    state = model.new_state(1)
    steps = [model.step(longer[:, t], state) for t in range(31)]
    torch.testing.assert_close(torch.stack(steps, 1), model(longer))


def test_a_longer_causal_layer_keeps_its_outputs() -> None:
    layer = LinearMultiheadAttention(6, 2, seq_len=16, proj_k=8, causal=True, block_size=4, batch_first=True).double()
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    before, _ = layer(x, x, x)
    resample(layer, max_len=32)
    assert (layer.seq_len, layer.proj_k) == (32, 16)
    torch.testing.assert_close(layer(x, x, x)[0], before)
    resample(layer, k=8)
    assert (layer.seq_len, layer.proj_k, layer.projection.k) == (32, 8, 1)


def test_a_classifier_on_a_stretched_input() -> None:
    model = LinformerClassifier(17, 3, 12, 8, 4, nhead=2, method="mean", local_kernel=0, positions="none").eval()
    tokens = torch.randint(17, (2, 12))
    before = model(tokens)
    resample(model, max_len=24)
    torch.testing.assert_close(model(tokens.repeat_interleave(2, 1)), before)


def test_what_cannot_be_resampled_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear owns no projection"):
        resample(torch.nn.Linear(2, 2), k=3)
    with pytest.raises(ValueError, match="does not own its projection"):
        resample(LinearMultiheadAttention(6, 2, projection=make_projection(8, 4)), k=3)
    with pytest.raises(ValueError, match="cross-attention has two lengths"):
        resample(LinformerEncDec(num_tokens=5, input_size=8, channels=8, dim_k=4).decoder, k=2)
    with pytest.raises(ValueError, match="k=4 would make them equal"):
        resample(Linformer(8, 8, [3, 2], depth=2), k=4)


def test_a_refusal_of_one_part_changes_no_other_part() -> None:
    sizes = {"input_size": 8, "channels": 8, "dim_k": 4, "positions": "learned"}
    model = LinformerEncDec(num_tokens=5, **sizes).eval()
    layers = torch.nn.Sequential(LinearMultiheadAttention(6, 2, seq_len=8, proj_k=4), torch.nn.Linear(6, 6))
    layers.append(LinearMultiheadAttention(6, 2, seq_len=8, proj_k=4, method="no_params"))
    layers.append(LinearMultiheadAttention(6, 2, method=torch.randn(8, 4), seq_len=8, proj_k=4))
    tokens = torch.randint(5, (2, 8))
    for module, message in ((model, "cross-attention has two lengths"), (layers, "matrix cannot be resampled")):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = {name: x.clone() for name, x in module.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            resample(module, max_len=16)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert all(parameter.grad.shape == parameter.shape for parameter in module.parameters())
    assert model.encoder.body.input_size == 8
    assert layers[0].seq_len == 8
    model(tokens, tokens)
    with pytest.raises(ValueError, match="at most input_size=8"):
        model.encoder(torch.randint(5, (2, 9)))
