"""Settings: what a preset fills in, what has no meaning, and what a saved run allows."""

import dataclasses
from pathlib import Path

import pytest
import tokenizers
import transformers

from linformers.models.options import Shared
from linformers.ops.blocks import block_sizes
from linformers.training import PRESETS, Settings
from linformers.training.models import Tokens, complete, configuration
from linformers.training.options import SETTINGS, in_options
from linformers.training.presets import DEFAULTS, SIZES, VOCABULARY
from linformers.training.settings import decoder_slots, default_block


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("task", ["mlm", "clm", "seq2seq", "classify"])
def test_presets_fill_everything_in(preset, task):
    filled = Settings(task=task, preset=preset).filled()
    optional = {
        "data",
        "column",
        "label_column",
        "target_column",
        "targets",
        "tokenizer",
        "vocab_size",
        "threads",
        "open_reach",
        "source",
        "label_separator",
        "epochs",
        "log_to",
    }
    causal = task in ("clm", "seq2seq")
    for name, value in dataclasses.asdict(filled).items():
        assert value is not None or name in optional or (name == "block_size" and not causal), name
    assert filled.filled() == filled
    assert filled.k == (SIZES["classify"][preset]["k"] if task == "classify" else filled.n // 4)
    if causal:  # slots are used: there are more than the two blocks that are seen exactly
        assert filled.n // block_sizes(filled.n, filled.k, filled.block_size)[0] >= 4


def test_the_tables_of_presets_are_those_of_the_code():
    """In docs/training.md: the numbers of the options, and for the other tasks the vocabulary."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    names = {
        "batch": "batch_size",
        "steps": "max_steps",
        "learning rate": "learning_rate",
        "feed-forward": "feedforward",
    }
    for task, title in (("mlm", "| preset |"), ("classify", "| preset of classify |")):
        header, _, *rows = (title + page.split(title)[1].split("\n\n")[0]).splitlines()
        columns = [names.get(name, name) for name in header.strip("| ").split(" | ")[1:]]
        assert len(rows) == len(PRESETS)
        for row in rows:
            preset, *values = row.strip("| ").replace(" (default)", "").replace(",", "").split(" | ")
            filled = dataclasses.asdict(Settings(task=task, preset=preset.strip("`")).filled())
            filled["new vocabulary"] = VOCABULARY[preset.strip("`")]
            assert [float(value) for value in values] == [filled[name] for name in columns], row


def test_the_slots_of_classify_follow_the_length_unless_content_chooses_them():
    assert Settings(task="classify", n=100).filled().k == SIZES["classify"]["small"]["k"]
    assert Settings(task="classify", n=100, method="learnable").filled().k == 25
    assert Settings(task="classify", n=100, k=7).filled().k == 7
    assert Settings(task="classify", n=5).filled().k == 5


def test_the_feed_forward_part_follows_the_width():
    assert Settings(task="classify").filled().feedforward == 2 * SIZES["classify"]["small"]["width"]
    assert Settings(task="classify", width=512).filled().feedforward == 1024
    assert Settings(task="mlm", width=512, heads=8).filled().feedforward == 2048


def test_embeddings_start_small_in_new_runs_alone():
    """A run that was saved before the setting existed has embeddings of variance 1; a source decides its own."""
    for task in ("mlm", "clm", "classify"):
        assert Settings(task=task).filled().embedding_scale == 0.02
    saved = Settings(**{**DEFAULTS, "task": "clm", "preset": "tiny"}).filled()
    assert (saved.embedding_scale, saved.tie) == (1.0, False)
    assert Settings(task="clm", source="run").filled().embedding_scale == DEFAULTS["embedding_scale"]


def test_every_token_has_a_row_where_a_tokeniser_skips_ids():
    vocabulary = {"<unk>": 0, "the": 1, "cat": 11}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="the")
    assert len(tokenizer) == 3
    assert configuration(Settings(task="clm").filled(), tokenizer, []).vocab_size == 12


@pytest.mark.parametrize("kind", ["linformer", "full"])
def test_the_decoder_sees_its_source_as_the_settings_say(kind):
    settings = Settings(task="seq2seq", cross_attention=kind).filled()
    assert configuration(settings, Tokens(7), []).cross_attention == kind
    short = configuration(Settings(task="seq2seq", n=64, k=16, target_n=16).filled(), Tokens(7), [])
    assert (short.proj_k, short.decoder_proj_k, short.cross_proj_k) == (16, 4, 16)  # the source keeps its length
    assert Settings(task="seq2seq").filled().cross_attention == "full"


@pytest.mark.parametrize("n", [5, 12, 64, 96, 100, 1000, 4096])
@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_the_default_block_size_is_valid(n, k):
    slots = decoder_slots(k, n, n)
    assert block_sizes(n, min(slots, n), default_block(n, min(slots, n)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n": 0}, "--n must be at least 1, got 0"),
        ({"max_steps": -3}, "--max-steps must be at least 1, got -3"),
        ({"patience": -1}, "--patience must not be negative, got -1"),
        ({"dropout": 1.5}, "--dropout must be from 0 to 1, got 1.5"),
        ({"mask_share": 1.0}, "--mask-share must be between 0 and 1, got 1.0"),
        ({"embedding_scale": 0.0}, "--embedding-scale must be more than 0, got 0.0"),
        ({"learning_rate": 0.0}, "--learning-rate must be more than 0, got 0.0"),
        ({"task": "nlp"}, "--task must be one of 'mlm', 'clm', 'seq2seq', 'classify'; got 'nlp'"),
        ({"preset": "huge"}, "--preset must be one of 'tiny', 'small', 'base'; got 'huge'"),
        (
            {"task": "clm", "n": 64, "k": 16, "block_size": 7},
            "--block-size 7 would give .* nearest block sizes are 4 and 8",
        ),
        ({"task": "clm", "n": 64, "k": 65}, "needs 1 <= k <= 64 .*, got --k 65"),
        (
            {"width": 130, "heads": 4},
            "--width 130 is not a multiple of --heads 4; give --width 128 or 132, or other --heads",
        ),
        ({"width": 3, "heads": 4}, "give --width 4, or other"),
        ({"positions": "rotary", "width": 18, "heads": 6}, "--width 18 with --heads 6 gives 3; give --width 24"),
        ({"local_kernel": 4}, "--local-kernel must be odd"),
        ({"attention": "local"}, "--attention 'local' needs --local-window, the positions of a block"),
        ({"attention": "full", "local_window": 8}, "--local-window 8 has no meaning with --attention 'full'"),
        ({"task": "clm", "local_window": 8}, "--local-window 8 is not for causal models, .* use --block-size"),
        (
            {"open_slots": 2, "method": "learnable"},
            "--open-slots 2 needs slots that are means of segments, .* --method 'learnable' .* use --method 'mean'",
        ),
        ({"task": "clm", "method": "mean", "open_reach": 9}, "--open-reach 9 has no meaning without --open-slots"),
        ({"sharing": "all"}, '--sharing is "all", and must be one of'),
        ({"positions": "polar"}, '--positions is "polar", and must be one of'),
    ],
)
def test_values_without_a_meaning(changes, message):
    with pytest.raises(ValueError, match=message):
        complete(Settings(**changes))


def test_messages_speak_of_options():
    for text, expected in (
        ("hidden_size=130 and nhead = 4", "--width 130 and --heads 4"),
        ("k must be positive; got k = 3 of 1 <= k <= 2", "--k must be positive; got --k 3 of 1 <= k <= 2"),
        ("attention needs proj_k", "attention needs --k"),
        (
            "/data/max_length/block_size.txt is 'k', my_local_window",
            "/data/max_length/block_size.txt is 'k', my_local_window",
        ),
    ):
        assert in_options(text) == expected


def test_every_option_that_a_model_checks_is_known_to_messages():
    assert {field.name for field in dataclasses.fields(Shared)} <= set(SETTINGS.values())


def test_a_saved_run_is_not_contradicted():
    saved = Settings(task="clm", preset="tiny", k=8).filled()
    assert Settings().resumed(saved) == saved
    assert Settings(k=8, task="clm").resumed(saved) == saved
    assert Settings(max_steps=7000, threads=2).resumed(saved) == dataclasses.replace(saved, max_steps=7000, threads=2)
    with pytest.raises(ValueError, match=r"--k is 16, but the saved run has 8; .*--no-resume"):
        Settings(k=16).resumed(saved)
    with pytest.raises(ValueError, match=r"--learning-rate is 0\.5, but the saved run has 0\.002"):
        Settings(learning_rate=0.5).resumed(saved)
    with pytest.raises(ValueError, match=r"--data is .*elsewhere, but the saved run has not set"):
        Settings(data=("elsewhere",)).resumed(saved)
