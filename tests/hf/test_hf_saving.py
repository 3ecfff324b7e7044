"""Saved and loaded is the same model, in every layout and under every name, or an error in words."""

import warnings

import pytest
import torch
from covering import covering
from hf_cases import (
    DEPTH,
    HEADS,
    LABELS,
    MODELS,
    VOCABULARY,
    K,
    N,
    assert_same_model,
    make,
    make_ids,
    make_inputs,
)
from old_layout import old_state
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from linformers import resample
from linformers.hf import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForSeq2SeqLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from linformers.projections.base import Projection
from linformers.projections.make import METHODS, SHARINGS

every = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


AUTO = [
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
]


# Saving and loading


@every
def test_saved_and_loaded_is_itself(kind, tmp_path):
    model, inputs = make(kind, dtype="float64"), make_inputs(kind, make_ids())
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=torch.float64)
    own = {"architectures": [kind.__name__], "_name_or_path": str(tmp_path)}
    assert loaded.config.to_dict() == model.config.to_dict() | own
    assert_same_model(loaded, model, inputs)
    auto = AUTO[MODELS.index(kind)].from_pretrained(tmp_path, device_map="cpu", dtype="auto")
    assert type(auto) is kind
    assert auto.dtype == torch.float64
    assert_same_model(auto, model, inputs)
    assert kind.from_pretrained(tmp_path, dtype=torch.bfloat16)(**inputs)[0].dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path).model_type == "linformer"


@pytest.mark.parametrize(
    **covering(method=METHODS, sharing=SHARINGS, kind=[LinformerForMaskedLM, LinformerForSeq2SeqLM])
)
def test_every_sharing_is_stored_once(kind, method, sharing, tmp_path):
    model = make(kind, sharing=sharing, method=method, dtype="float64")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    own = {name: x for name, x in stored.items() if "projection" in name}
    stacks = 1 if kind is LinformerForMaskedLM else 3  # the decoder has one for the target and one for the source
    layers = 1 if sharing == "layerwise" else DEPTH
    count = {"none": 2 * HEADS, "headwise": 2, "kv": 1, "layerwise": 1}[sharing]
    if method == "content":  # keys and values share the choice
        count = HEADS if sharing == "none" else 1
    if method in ("learnable", "no_params", "convolution", "content"):
        assert len(own) == stacks * layers
        found = [p for p in model.modules() if isinstance(p, Projection)]
        assert {p.count for p in found} == {count}
        assert sum(x.shape[1] for x in own.values()) == sum(
            p.count * (1 if method == "convolution" else p.k) for p in found
        )
    else:
        assert not own
    inputs = make_inputs(kind, make_ids())
    assert_same_model(kind.from_pretrained(tmp_path), model, inputs)


@pytest.mark.parametrize(
    **covering(
        kind=[LinformerForMaskedLM, LinformerForSeq2SeqLM],
        method=["learnable", "no_params", "convolution"],
        sharing=SHARINGS,
        shards=[False, True],
    )
)
def test_files_of_the_old_layout_load(kind, method, sharing, shards, tmp_path):
    model, inputs = make(kind, sharing=sharing, method=method, dtype="float64"), make_inputs(kind, make_ids())
    model.save_pretrained(tmp_path, max_shard_size="4KB" if shards else "50GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == shards
    for path in files:
        state, names = load_file(path), set(load_file(path))
        old = old_state(model, model.state_dict())
        save_file({name: old[name] for name in state}, path, {"format": "pt"})
        assert set(load_file(path)) == names
    for load in (kind, AUTO[MODELS.index(kind)]):
        loaded, info = load.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
        assert not any(info[found] for found in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
        assert_same_model(loaded, model, inputs)
    loaded.save_pretrained(tmp_path / "again")
    for name, x in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(x, model.state_dict()[name]), name


@pytest.mark.parametrize("kind", [LinformerModel, LinformerForMaskedLM], ids=lambda kind: kind.__name__)
def test_an_old_file_loads_with_and_without_its_head(kind, tmp_path):
    """transformers adds or removes the prefix of the inner model."""
    model = make(LinformerForMaskedLM if kind is LinformerModel else LinformerModel, sharing="none", dtype="float64")
    model.save_pretrained(tmp_path)
    save_file(
        {name: old_state(model)[name] for name in load_file(tmp_path / "model.safetensors")},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = kind.from_pretrained(tmp_path, dtype=torch.float64)
    inner, expected = (m if isinstance(m, LinformerModel) else m.model for m in (loaded, model))
    ids = make_ids()
    assert_close(inner(ids).last_hidden_state, expected(ids).last_hidden_state)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_more_slots_than_positions_are_warned_of_once(sharing):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make(LinformerForMaskedLM, sharing=sharing, proj_k=N + 2)
    assert [str(each.message).partition(":")[0] for each in found] == [f"k = {N + 2} slots for at most {N} positions"]


def test_a_causal_checkpoint_is_causal_without_its_head(tmp_path):
    model, ids = make(LinformerForCausalLM), make_ids()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert base.config.is_decoder
    assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_position_embeddings": N + 2}, rf"projection.weight of shape \({N}, {K}\).*linformers.resample"),
        ({"proj_k": K - 1}, "linformers.resample"),
        ({"vocab_size": VOCABULARY + 1}, "resize_token_embeddings"),
        ({"num_labels": LABELS + 1}, "ignore_mismatched_sizes=True"),
        ({"sharing": "kv"}, "lacks model.body.linformer.layers.0.attention.projection.weight and 1 more"),
        ({"num_hidden_layers": DEPTH + 1}, "lacks model.body.linformer.layers.2"),
        ({"num_hidden_layers": 1}, "has, beyond what the configuration asks for, model.body.linformer.layers.1"),
        ({"method": "mean"}, "has, beyond .* model.body.linformer.projection.weight"),
    ],
)
def test_weights_of_another_configuration_are_an_error(options, message, tmp_path):
    make(LinformerForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        LinformerForSequenceClassification.from_pretrained(tmp_path, **options)


def test_a_new_head_is_allowed(tmp_path):
    make(LinformerForMaskedLM).save_pretrained(tmp_path)
    model, info = LinformerForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    model.save_pretrained(tmp_path)
    other = LinformerForTokenClassification.from_pretrained(tmp_path, num_labels=2, ignore_mismatched_sizes=True)
    assert other(make_ids()).logits.shape == (3, 11, 2)


def test_resampled_models_save_and_load(tmp_path):
    for kind, options in (
        (LinformerForMaskedLM, {"position_embedding_type": "learned"}),
        (LinformerForCausalLM, {}),
        (LinformerForMaskedLM, {"method": "convolution", "sharing": "none"}),
    ):
        model = resample(make(kind, dtype="float64", **options), max_len=2 * N)
        model.save_pretrained(tmp_path)
        ids = make_ids(2, 2 * N)
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.config.max_position_embeddings == 2 * N
        assert_same_model(loaded, model, {"input_ids": ids})
    with pytest.raises(ValueError, match="resample changes one length, but a sequence-to-sequence model has two"):
        resample(make(LinformerForSeq2SeqLM), max_len=2 * N)
