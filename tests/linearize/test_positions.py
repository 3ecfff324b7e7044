"""Positions for inputs that are longer than a model has them: refused, or stretched, saved and loaded."""

import numpy as np
import pytest
import torch
import transformers
from encoder_cases import TEXT_NAMES, N, inputs, make, pair
from torch import nn

from linformers.linearize import linearize, stretch_positions
from linformers.linearize.positions import first_position, interpolate

LONG = 29
TABLES = tuple(name for name in TEXT_NAMES if name != "modernbert")


def table(model):
    return next(p for key, p in model.named_parameters() if key.endswith("position_embeddings.weight"))


@pytest.mark.parametrize("name", TABLES)
def test_a_length_without_positions_is_refused_before_any_work(name):
    model, original = pair(name)
    with pytest.raises(ValueError, match=f"max_len = 29, but this {name} model has 13 position embeddings.*'stretch'"):
        linearize(model, k=5, max_len=LONG)
    assert type(model) is type(original)
    assert model.config.to_dict() == original.config.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    linearize(model, k=5, max_len=N)  # what it has positions for is not


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_stretched_saved_and_loaded(name, head, tmp_path):
    model = make(name, head)
    before = model.config
    report = linearize(model, k=5, max_len=LONG, positions="stretch")
    words = "rotary; their bound is now 29" if name == "modernbert" else "positions stretched from 13 to 29"
    assert words in str(report)
    assert before.max_position_embeddings == N + first_position(before)  # others may use the same object
    batch = inputs(name, LONG, (LONG, 17))
    output = model(**batch)[0]
    assert output.isfinite().all()
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.max_position_embeddings == LONG + first_position(before)
    torch.testing.assert_close(loaded(**batch)[0], output)


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_with_as_many_slots_as_tokens_it_is_the_stretched_original(name):
    model, original = pair(name)
    linearize(model, k=LONG, max_len=LONG, positions="stretch")
    stretch_positions(original, LONG)
    for n, lengths in ((LONG, None), (LONG, (LONG, 11)), (7, None)):
        batch = inputs(name, n, lengths)
        real = batch.get("attention_mask", torch.ones(2, n)).bool()
        got, expected = model(**batch)[0], original(**batch)[0]
        torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_spread_between_the_first_and_the_last(name):
    model, original = pair(name)
    linearize(model, k=5, max_len=2 * N - 1, positions="stretch")
    first = first_position(original.config)
    assert torch.equal(table(model)[:first], table(original)[:first])
    old, new = table(original)[first:], table(model)[first:]
    assert new.shape == (2 * N - 1, old.shape[1])
    torch.testing.assert_close(new[::2], old)  # every other one is an old row
    torch.testing.assert_close(new[1::2], (old[1:] + old[:-1]) / 2)
    assert table(model).requires_grad
    for (key, a), (_, b) in zip(model.named_buffers(), original.named_buffers(), strict=False):
        if key.endswith(("position_ids", "token_type_ids")):
            assert a.shape == (1, 2 * N - 1 + first)
            assert torch.equal(a[:, :N], b[:, :N])


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_an_equal_or_shorter_length_changes_no_positions(name):
    for length in (N, 7):
        model, same = pair(name)
        report = linearize(model, k=5, max_len=length, positions="stretch")
        linearize(same, k=5, max_len=length)
        assert report.positions == ""
        batch = inputs(name, length)
        assert torch.equal(model(**batch)[0], same(**batch)[0])


def test_rotary_positions_need_no_option():
    model = make("modernbert")
    report = linearize(model, k=5, max_len=LONG)
    assert "rotary" in report.positions
    assert model(**inputs("modernbert", LONG))[0].shape == (2, LONG, 12)


def test_calibration_at_the_new_length():
    model = make("bert")
    batches = [inputs("bert", LONG) for _ in range(2)]
    options = {"k": "spectrum", "method": "learnable", "fit_steps": 3, "calibration": batches}
    report = linearize(model, max_len=LONG, positions="stretch", **options)
    assert all(1 <= new.k <= LONG for new in report.replaced)


def test_an_encoder_inside_another_module():
    outer = nn.ModuleDict({"inner": make("roberta"), "images": make("vit")})
    with pytest.raises(ValueError, match="this roberta model has 13 position embeddings"):
        linearize(outer, k=5, max_len=LONG)
    assert stretch_positions(outer["inner"], LONG).startswith("positions stretched from 13 to 29")
    linearize(outer, k=5, max_len=LONG)
    assert outer["inner"](**inputs("roberta", LONG))[0].shape == (2, LONG, 12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_type_stays(dtype):
    rows = torch.randn(N, 5)
    found = interpolate(rows.to(dtype), LONG)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), interpolate(rows, LONG), atol=0.02, rtol=0.02)


def test_numbers_of_numpy_are_saved(tmp_path):
    model, sizes = make("bert"), {"k": [np.int64(5)] * 3, "max_len": np.int64(LONG), "open_slots": np.int64(1)}
    linearize(model, positions="stretch", **sizes)
    model.save_pretrained(tmp_path)
    assert transformers.AutoModel.from_pretrained(tmp_path).config.max_position_embeddings == LONG
    stretch_positions(other := make("bert"), np.int64(LONG))
    other.save_pretrained(tmp_path / "other")


def test_lengths_of_other_types_are_refused():
    for length, error, message in (
        (None, TypeError, "max_len must not be None"),
        ("long", TypeError, "max_len must be a whole number, got 'long'"),
        (0, ValueError, "max_len must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=message):
            stretch_positions(make("bert"), length)


def test_what_cannot_be_stretched_is_refused():
    with pytest.raises(ValueError, match=r"a ViT stretches its positions itself.*interpolate_pos_encoding=True"):
        linearize(make("vit"), k=5, max_len=LONG, positions="stretch")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, batch_first=True), 1)
    with pytest.raises(ValueError, match="for Hugging Face encoders of text, and TransformerEncoder holds none"):
        linearize(encoder, k=5, max_len=LONG, positions="stretch")
    with pytest.raises(ValueError, match="TransformerEncoder contains no Hugging Face encoder"):
        stretch_positions(encoder, LONG)
    with pytest.raises(ValueError, match="positions must be one of 'keep', 'stretch'; got 'longer'"):
        linearize(make("bert"), k=5, max_len=N, positions="longer")


def test_a_vit_takes_larger_images_as_before():
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=17, image_size=6, patch_size=2
    )
    model = transformers.ViTModel(config).eval()
    linearize(model, k=5, max_len=LONG)
    assert model(pixel_values=torch.randn(2, 3, 8, 14), interpolate_pos_encoding=True)[0].shape == (2, LONG, 12)
