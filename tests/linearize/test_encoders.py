"""Linearised Hugging Face encoders: the same as the original at k = n, saved and loaded, and never taken for the original."""

import subprocess
import sys

import pytest
import torch
import transformers
from covering import covering
from encoder_cases import HEADS, MODELS, NAMES, TEXT_NAMES, N, assert_same_gradients, inputs, make, make_config, pair
from old_layout import old_state
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from linformers.linearize import linearize
from linformers.linearize.encoders import attention_modules


@pytest.mark.parametrize("method", ["mean", "learnable"])
@pytest.mark.parametrize("name", NAMES)
def test_k_equal_to_n_changes_nothing(name, method):
    model, original = pair(name)
    linearize(model, k=N, max_len=N, method=method)
    for n, lengths in ((N, None), (1, None), (7, None), (N, (N, 5)), (9, (4, 9)), (N, (1, 2))):
        batch = inputs(name, n, lengths)
        real = batch.get("attention_mask", torch.ones(2, n)).bool() if name != "vit" else ...
        got, expected = model(**batch).last_hidden_state, original(**batch).last_hidden_state
        torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_at_k_equal_to_n(name):
    model, original = pair(name)
    linearize(model, k=N, max_len=N, method="learnable")
    batch = inputs(name, N, None if name == "vit" else (N, 6))
    assert_same_gradients(model, original, batch)


@pytest.mark.parametrize("name", TEXT_NAMES)
@pytest.mark.parametrize("window", [0, 2])
def test_inputs_of_at_most_k_tokens_stay_exact(name, window):
    model, original = pair(name)
    linearize(model, k=7, max_len=N, method="learnable", local_window=window)
    shake(model)
    for n, lengths in ((7, None), (2, None), (N, (7, 4))):
        batch = inputs(name, n, lengths)
        real = batch.get("attention_mask", torch.ones(2, n)).bool()
        got, expected = model(**batch).last_hidden_state, original(**batch).last_hidden_state
        torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TEXT_NAMES)
@pytest.mark.parametrize("options", [{}, {"method": "learnable", "sharing": "none"}, {"local_window": 2}])
def test_padding_equals_trimming(name, options):
    model = make(name)
    linearize(model, k=5, max_len=N, **options)
    shake(model)
    batch = inputs(name, 11, (11, 6))
    padded = model(**batch).last_hidden_state[1, :6]
    trimmed = model(input_ids=batch["input_ids"][1:, :6]).last_hidden_state[0]
    torch.testing.assert_close(padded, trimmed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(**covering(name=NAMES, head=[False, True], was_loaded=[False, True]))
def test_saved_and_loaded_is_the_same(name, head, was_loaded, tmp_path):
    model = make(name, head)
    if was_loaded:  # transformers then remembers which names its file had
        model.save_pretrained(tmp_path / "original")
        model = type(model).from_pretrained(tmp_path / "original", dtype=torch.float64).eval()
    linearize(model, k=5, max_len=N, method="learnable", local_window=2)
    shake(model)
    model.save_pretrained(tmp_path)
    batch = inputs(name)
    if not head:
        auto = transformers.AutoModel
    else:
        auto = getattr(transformers, f"AutoModelFor{HEADS[name].__name__.partition('For')[2]}")
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is type(model)
    assert loaded.config.model_type == f"linformers-{name}"
    assert loaded.config.linformers == model.config.linformers
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], model(**batch)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(**covering(name=NAMES, head=[False, True], sharing=["none", "headwise", "kv"]))
def test_files_of_the_old_layout_load(name, head, sharing, tmp_path):
    """Also ViT's, whose patches are made by another ``projection.weight`` with four axes."""
    model = make(name, head)
    linearize(model, k=5, max_len=N, method="learnable", sharing=sharing)
    shake(model)
    model.save_pretrained(tmp_path)
    path, state = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    ours, written = model.state_dict(), {}
    for key, old in old_state(model).items():
        if old.shape != ours[key].shape:
            (place,) = (
                p
                for p in state
                if p not in written and state[p].shape == ours[key].shape and torch.equal(state[p], ours[key])
            )
            written[place] = old
    save_file(state | written, path, {"format": "pt"})
    auto = transformers.AutoModel
    if head:
        auto = getattr(transformers, f"AutoModelFor{HEADS[name].__name__.partition('For')[2]}")
    loaded, info = auto.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info[found] for found in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    batch = inputs(name)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], model(**batch)[0], rtol=0, atol=1e-12)
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {key: x.shape for key, x in again.items()} == {key: x.shape for key, x in state.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_stock_class_does_not_run_it(name, tmp_path):
    model = make(name)
    stock = type(model)
    linearize(model, k=5, max_len=N)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="stock module without a projection"):
        stock.from_pretrained(tmp_path)(
            **{key: x.float() if x.is_floating_point() else x for key, x in inputs(name).items()}
        )
    with pytest.raises(ValueError, match="attn_implementation='sdpa', but this model was linearised"):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="runs with 'linformers' only"):
        model.set_attn_implementation("eager")


def test_without_this_package_a_stock_class_does_not_even_load_it(tmp_path):
    model = make("bert")
    linearize(model, k=5, max_len=N)
    model.save_pretrained(tmp_path)
    script = (
        "import sys, transformers\n"
        "for load in (transformers.BertModel, transformers.AutoModel):\n"
        "    try: load.from_pretrained(sys.argv[1])\n"
        "    except ValueError as error: print('refused:', str(error).splitlines()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.count("refused") == 2
    assert 'attn_implementation="linformers"` is not supported' in done.stdout


class LargestSquare(TorchDispatchMode):
    """Refuses tensors with two axes of the length of the input."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and sum(size >= self.n for size in x.shape) > 1:
                raise AssertionError(f"{function} made {tuple(x.shape)}")
        return out


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_nothing_of_n_by_n_is_made(name):
    n = 101  # larger than every other axis
    config = make_config(name)
    config.max_position_embeddings = n + 2
    model = MODELS[name](config).eval()
    batch = {"input_ids": torch.randint(3, 31, (2, n)), "attention_mask": torch.ones(2, n, dtype=torch.long)}
    batch["attention_mask"][1, 60:] = 0
    linearize(model, k=7, max_len=n)
    with LargestSquare(n):
        model(**batch).last_hidden_state.sum().backward()


def test_the_guard_sees_the_mask_of_the_original():
    model = make("bert")
    with pytest.raises(AssertionError, match="made"), LargestSquare(N):
        model(**inputs("bert", N, (N, 4)))


@pytest.mark.parametrize("name", NAMES)
def test_attentions_and_hidden_states_are_returned(name):
    model = make(name)
    linearize(model, k=5, max_len=N)
    assert model(**inputs(name)).attentions is None
    output = model(**inputs(name), output_attentions=True, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    globally = [w for w in output.attentions if w is not None]
    assert all(w.shape == (2, 3, N, 5) for w in globally)
    for weights in globally:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, N, dtype=torch.float64))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_gradients_reach_attentions_and_hidden_states(name, window):
    model = make(name)
    linearize(model, k=5, max_len=N, local_window=window)
    batch = inputs(name, 11, (11, 7))
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    shown = [*outputs.attentions, *outputs.hidden_states[:-1]]
    for x in shown:
        x.retain_grad()
    outputs.last_hidden_state[:, 0].square().sum().backward()
    for x in shown:
        assert x.grad is not None
        assert x.grad.any()


def test_modernbert_keeps_its_local_layers():
    model = make("modernbert")
    report = linearize(model, k=5, max_len=N)
    assert [new.name for new in report.replaced] == ["layers.0.attn", "layers.3.attn"]
    assert [(old.name, old.why) for old in report.left] == [
        ("layers.1.attn", "local attention, linear already"),
        ("layers.2.attn", "local attention, linear already"),
    ]


def test_layers_that_are_left_alone_stay_exact_and_are_saved_so(tmp_path):
    model, original = pair("bert")
    report = linearize(model, k=N, max_len=N, layers=[1])
    assert model.config.linformers["slots"] == [0, N, 0]
    assert [old.why for old in report.left] == ["not among the layers asked for"] * 2
    batch = inputs("bert", 9, (9, 4))
    torch.testing.assert_close(model(**batch)[0][1, :4], original(**batch)[0][1, :4])
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert [module.projection is None for _, module in attention_modules(loaded)] == [True, False, True]


def test_a_configuration_that_others_use_is_not_changed():
    config = make_config("bert")
    model, other = transformers.BertModel(config), transformers.BertModel(config)
    linearize(model, k=5, max_len=N)
    assert type(other.config) is transformers.BertConfig
    assert other.config._attn_implementation != "linformers"
    other(**inputs("bert"))


def test_an_encoder_inside_another_module_is_found():
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = make("roberta")

        def forward(self, **batch):
            return self.encoder(**batch).last_hidden_state.mean(1)

    model = Pooled()
    report = linearize(model, k=5, max_len=N)
    assert [new.name for new in report.replaced] == [f"encoder.encoder.layer.{i}.attention.self" for i in range(3)]
    assert model(**inputs("roberta")).shape == (2, 12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "learnable"},
        {"method": "learnable", "sharing": "none"},
        {"method": "content"},
        {"method": "content", "sharing": "none"},
    ],
)
def test_shortening_before_the_maps_or_after_them_is_the_same(name, options):
    """A subclass of ``nn.Linear`` may do anything, so that it is run on all positions."""
    early, late = make(name), make(name)
    for model in (early, late):
        linearize(model, k=5, max_len=N, **options)
    shake(early)
    late.load_state_dict(early.state_dict())
    for module in late.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OwnLinear
    for batch in (inputs(name), inputs(name, 9, (9, 7))) if name != "vit" else (inputs(name),):
        got, expected = early(**batch).last_hidden_state, late(**batch).last_hidden_state
        torch.testing.assert_close(got, expected)


class OwnLinear(torch.nn.Linear):
    pass


class Adapter(torch.nn.Module):
    """What LoRA puts around a linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = (torch.nn.Linear(12, 12, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_work_on_the_linear_maps():
    model, original = pair("bert")
    linearize(model, k=N, max_len=N)
    for each in (model, original):
        torch.manual_seed(3)
        for layer in each.encoder.layer:
            for name in ("query", "key", "value"):
                setattr(layer.attention.self, name, Adapter(getattr(layer.attention.self, name)))
    batch = inputs("bert")
    torch.testing.assert_close(model(**batch)[0], original(**batch)[0])
    model(**batch)[0].sum().backward()
    assert model.encoder.layer[0].attention.self.key.up.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"method": "learnable", "sharing": "none"}])
def test_hooks_on_the_linear_maps_take_effect(name, options):
    """What a hook on the keys returns is attended to, as in the original."""
    model, original = pair(name)
    linearize(model, k=N, max_len=N, **options)
    batch = inputs(name)
    for each in (model, original):
        for module in each.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda m, i, output: output.sin())
    torch.testing.assert_close(model(**batch)[0], original(**batch)[0])


def test_training_mode_and_heads_share_the_encoder(tmp_path):
    model = make("bert", head=True).train()
    linearize(model, k=5, max_len=N, method="learnable")
    assert all(module.training for module in model.modules())
    loss = model(**inputs("bert"), labels=torch.tensor([0, 1])).loss
    loss.backward()
    model.eval().save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(base).__name__ == "LinearizedBertModel"
    batch = inputs("bert")
    torch.testing.assert_close(base(**batch)[0], model.bert(**batch)[0])


def test_errors_have_their_numbers():
    model = make("bert")
    linearize(model, k=5, max_len=11)
    with pytest.raises(ValueError, match="got a sequence of 13, but this projection was built for at most 11"):
        model(**inputs("bert"))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 1, 7, 7\).*takes a padding mask \(2, 7\)"):
        model(**inputs("bert", 7), attention_mask=torch.ones(2, 1, 7, 7))
    config = make_config("bert")
    config.is_decoder = True
    with pytest.raises(ValueError, match="nothing to replace in BertModel"):
        linearize(transformers.BertModel(config), k=5, max_len=N)
    with pytest.raises(ValueError, match="has no `linformers` settings"):
        type(model)(type(model.config)())


def shake(model):
    """Give learned corrections something to do."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("projection.weight"):
                parameter.normal_(std=0.1)
