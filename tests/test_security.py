"""Malicious files, and what ``SECURITY.md`` promises about them."""

import ast
import json
import re
import shutil
import socket
import struct
from pathlib import Path

import pytest
from errors_cases import Payload, call
from saved_cases import save_bert

ROOT = Path(__file__).parents[1]
SIZES = {"vocab_size": 17, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
PICKLES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


def promises() -> list[str]:
    return re.findall(r"`(tests/\S+::\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("test", promises())
def test_every_promise_names_its_test(test):
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_source_has_nothing_that_runs_what_it_reads():
    wrong = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names) if any(n.name.split(".")[0] in PICKLES for n in names):
                    wrong.append((path, node.lineno))
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                    wrong.append((path, node.lineno))
                case ast.ImportFrom(module="torch", names=names) if any(n.name == "load" for n in names):
                    wrong.append((path, node.lineno))
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile")):
                    wrong.append((path, node.lineno))
                case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch"))):
                    wrong.append((path, node.lineno))
                case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=value) if not is_false(value):
                    wrong.append((path, value.lineno))
                case ast.Dict(keys=keys, values=values):
                    named = zip((getattr(key, "value", None) for key in keys), values, strict=True)
                    wrong += [(path, v.lineno) for key, v in named if key == "trust_remote_code" and not is_false(v)]
    assert not wrong


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A saved model of this package, in the working directory."""
    from linformers.hf import LinformerConfig, LinformerModel

    monkeypatch.chdir(tmp_path)
    LinformerModel(LinformerConfig(**SIZES, max_position_embeddings=12, proj_k=4)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_own_models_are_not_looked_for_in_a_pickle(model):
    import pickle

    from linformers.hf import LinformerModel

    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        LinformerModel.from_pretrained(model)
    assert not Path("unpickled").exists()


def test_a_pickle_with_the_weights_of_another_encoder_is_not_run(tmp_path, monkeypatch):
    """Weights of others may be in ``pytorch_model.bin``: tensors are read, and a pickle of anything else is refused."""
    import pickle

    import torch
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    bert = save_bert(tmp_path / "bert")
    weights = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    command = ["linearize", str(bert), "--k", "4", "--max-len", "12", "--out", "new"]
    torch.save(weights, bert / "pytorch_model.bin")
    code, said = call(command)
    assert code == 0, said
    shutil.rmtree("new")
    torch.save(weights | {"more": Payload()}, tmp_path / "zipped")  # as torch writes it: a pickle in a zip file
    (tmp_path / "plain").write_bytes(pickle.dumps(Payload(), protocol=2))
    for name in ("zipped", "plain"):
        shutil.copy(tmp_path / name, bert / "pytorch_model.bin")
        for words in (command, ["heads", str(bert), "w1 w2"], ["embed", str(bert), "w1 w2"]):
            code, said = call(words)
            assert code == 1, words
            assert "it is damaged, or a pickle with more in it than tensors, which is not run" in said
    assert not Path("unpickled").exists()
    assert not Path("new").exists()


def header(**tensor) -> bytes:
    """The beginning of a file of weights that promises one tensor."""
    text = json.dumps({"body.token_emb.weight": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**60) + b"{}",
        header(dtype="F32", shape=[2**40, 2**20], data_offsets=[0, 2**62]),
        header(dtype="F32", shape=[17, 6], data_offsets=[0, 408]),
        header(dtype="F32", shape=[17, -6], data_offsets=[0, 408]) + bytes(408),
        header(dtype="F32", shape=[17, 6], data_offsets=[10**9, 10**9 + 408]) + bytes(408),
    ],
    ids=["length", "shape", "absent", "negative", "elsewhere"],
)
def test_headers_that_promise_too_much(model, content):
    from linformers.hf import LinformerModel

    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"the weights of .* are damaged: "):
        LinformerModel.from_pretrained(model)
    code, said = call(["export", str(model)])
    assert code == 1
    assert said.startswith("error: cannot read the model of ")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/hostname", "inner/pipe", "..", 3])
def test_an_index_of_weights_names_only_files_beside_it(model, name):
    from linformers.hf import LinformerModel

    (model / "model.safetensors").rename(model.parent / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {"body.token_emb.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json is damaged: weight_map\.body\.token_emb\.weight is "):
        LinformerModel.from_pretrained(model)
    (model.parent / "secret.safetensors").rename(model / "other.safetensors")  # commands look for one first
    code, said = call(["export", str(model)])
    assert code == 1
    assert "index.json is damaged: weight_map" in said


def test_weights_in_several_files(model):
    """What the check must let through."""
    from linformers.hf import LinformerModel

    first = LinformerModel.from_pretrained(model)
    first.save_pretrained(model.parent / "sharded", max_shard_size="1KB")
    assert (model.parent / "sharded" / "model.safetensors.index.json").is_file()
    second = LinformerModel.from_pretrained(model.parent / "sharded")
    assert all(x.equal(y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


@pytest.fixture
def asked(monkeypatch):
    """What the network was asked for, without the switch of the tests that forbids it."""
    found = []

    def refuse(*args, **options):
        found.append(args)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return found


def test_commands_do_not_reach_for_the_network(model, asked):
    """Not even with a name that the hub would know."""
    Path("text.txt").write_text("one two\n\nthree four\n", encoding="utf-8")
    name = "bert-base-uncased"
    for words in (
        ["linearize", name, "--k", "4", "--max-len", "12", "--out", "new"],
        ["spectrum", name],
        ["heads", name, "a b"],
        ["embed", name, "a b"],
        ["export", name],
        ["evaluate", name],
        ["generate", name, "a b"],
        ["fill-mask", name, "a b"],
        ["classify", name, "a b"],
        ["plot", name],
        ["report", name, "--out", "new.html"],
        ["compare", "--from", name, "--data", "text.txt", "--out", "new"],
        ["train", "--from", name, "--data", "text.txt", "--out", "new"],
        ["prepare", "text.txt", "--tokenizer", name, "--out", "new"],
        ["embed", str(model), "a b"],  # without a tokeniser
    ):
        assert call(words)[0] == 1, words
        assert not asked, words


def test_training_and_using_a_run_does_not_reach_for_the_network(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"one two {i} three\n" for i in range(60)), encoding="utf-8")
    sizes = "--n 16 --k 4 --width 8 --depth 1 --heads 2 --max-steps 1 --batch-size 2 --threads 1"
    for words in (
        ["prepare", "text.txt", "--documents", "lines", "--vocab-size", "280", "--out", "data"],
        ["train", "--task", "clm", "--data", "data", "--out", "run", *sizes.split()],
        ["evaluate", "run"],
        ["generate", "run", "one two", "--max-new-tokens", "2"],
        ["embed", "run", "one two"],
        ["report", "run", "--no-models", "--out", "report.html"],
    ):
        code, said = call(words)
        assert code == 0, said
        assert not asked, words
