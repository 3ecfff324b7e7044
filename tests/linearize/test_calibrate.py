"""What calibration inputs are for: k from the spectrum, and projections that are fitted to them."""

import copy

import pytest
import torch
from encoder_cases import N, inputs, make, pair
from torch import nn

from linformers.linearize import CorrectedMean, TokenMeans, linearize
from linformers.linearize.calibrate import Sample, fit, output_error, slots_for
from linformers.projections.pooling import Mean


def sample(b=2, h=3, n=11, d=5, lengths=None):
    keep = None if lengths is None else torch.arange(n) < torch.tensor(lengths)[:, None]
    return Sample(*(2 * torch.randn(b, h, n, d) for _ in range(3)), keep)


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv"])
def test_a_fit_lowers_the_error_and_starts_at_the_mean(sharing):
    samples = [sample(lengths=(11, 7)), sample()]
    parts, heads = {"none": (2, 3), "headwise": (2, 1), "kv": (1, 1)}[sharing]
    projection = CorrectedMean(11, 4, parts, heads)
    before, after = fit(projection, samples, steps=40)
    assert before == pytest.approx(output_error(TokenMeans(11, 4), samples))
    assert after == output_error(projection, samples)
    assert after < 0.9 * before
    assert projection.weight.grad is None


def test_a_fit_never_makes_it_worse():
    projection = CorrectedMean(11, 6)
    before, after = fit(projection, [sample()], steps=4, lr=1e4)
    assert after == before
    assert (projection.weight == 0).all()
    assert fit(CorrectedMean(11, 11), [sample()], steps=4)[1] < 1e-9  # exact already
    with pytest.raises(ValueError, match="Mean has nothing to fit"):
        fit(Mean(11, 4), [sample()], steps=1)


def test_the_spectrum_finds_the_rank():
    q, k, v, *_ = sample()
    alike = Sample(q[:, :, :1].expand_as(q), k, v, None)  # equal queries have equal rows of attention: rank 1
    assert slots_for([alike], 0.999) == 1
    mixed = sample()
    sizes = [slots_for([mixed], share) for share in (0.3, 0.6, 0.9, 1.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] <= 11
    with pytest.raises(ValueError, match=r"share must be above 0 and at most 1, got 1\.5"):
        slots_for([mixed], 1.5)


@pytest.mark.parametrize("name", ["bert", "modernbert", "vit"])
def test_an_encoder_is_fitted_where_it_is_replaced(name):
    model, original = pair(name)
    batches = [inputs(name) for _ in range(2)]
    report = linearize(model, k=6, max_len=N, method="learnable", calibration=batches, fit_steps=30)
    assert all(new.error_after < new.error_before for new in report.replaced)
    assert "error 0." in str(report)
    plain = copy.deepcopy(original)
    linearize(plain, k=6, max_len=N)

    def distance(other):
        with torch.no_grad():
            return sum((other(**b)[0] - original(**b)[0]).square().sum() for b in batches)

    assert distance(model) < distance(plain)


def test_slots_of_each_layer_come_from_its_spectrum():
    model = make("bert")
    batches = [inputs("bert", N, (N, 8))]
    report = linearize(model, k="spectrum", max_len=N, calibration=batches, share=0.8)
    assert model.config.linformers["slots"] == [new.k for new in report.replaced]
    assert all(1 <= new.k < N for new in report.replaced)
    model(**batches[0])


def test_torch_modules_are_calibrated_too():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 19, batch_first=True), 2)
    batches = [torch.randn(4, 11, 16)]
    report = linearize(
        model, k="spectrum", max_len=11, method="learnable", share=0.6, calibration=batches, fit_steps=30
    )
    assert all(new.error_after < new.error_before for new in report.replaced)
    assert model.training
    decoder = nn.TransformerDecoderLayer(16, 2, 19)
    with pytest.raises(ValueError, match="self_attn becomes block-causal: give its k as a number"):
        linearize(decoder, k="spectrum", max_len=11, causal="block", calibration=batches)
