"""Malicious files, and what ``SECURITY.md`` promises about them."""

import ast
import json
import re
import socket
import struct
from pathlib import Path

import pytest
from errors_cases import Payload, call

ROOT = Path(__file__).parents[1]
SIZES = {"vocab_size": 17, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
NETWORK = "the network was asked for"


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
                case ast.Import(names=names) if any(n.name in ("pickle", "marshal", "shelve", "dill") for n in names):
                    wrong.append((path, node.lineno))
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile")):
                    wrong.append((path, node.lineno))
                case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch" | "pickle"))):
                    wrong.append((path, node.lineno))
                case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                    wrong.append((path, node.value.lineno))
    assert not wrong


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


def test_commands_do_not_reach_for_the_network(model, monkeypatch):
    """Not even with a name that the hub would know, and without the switch that forbids it."""

    def refuse(*args, **options):
        raise AssertionError(NETWORK)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
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
        ["train", "--from", name, "--data", "text.txt", "--out", "new"],
        ["prepare", "text.txt", "--tokenizer", name, "--out", "new"],
        ["embed", str(model), "a b"],  # without a tokeniser
    ):
        code, said = call(words)
        assert code == 1, words
        assert NETWORK not in said
