"""Write the files of this folder with the code as it is: ``python tests/saved/write.py tests/saved/VERSION``.

Run once for a version whose format differs from the one before; what it wrote is never changed afterwards. The tests beside it load
these files with today's code, go on with the runs, and compare with the outputs that the code of that time had.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from linformers import LinearMultiheadAttention, Linformer, LinformerClassifier, LinformerEncDec, LinformerLM

WORDS = [
    "the",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "sang",
    "on",
    "over",
    "under",
    "mat",
    "hill",
    "tree",
    "old",
    "two",
    "a",
]
# Every sharing mode, so that every layout of projections and of their moments is in some file.
RUNS = {"mlm": "layerwise", "clm": "kv", "seq2seq": "headwise", "classify": "none"}
SETTINGS = {
    "preset": "tiny", "n": 24, "k": 6, "width": 8, "depth": 2, "heads": 2, "batch_size": 4, "max_steps": 6, "save_steps": 3,
    "eval_steps": 3, "log_steps": 1, "dropout": 0.1, "tokenizer": "words", "threads": 1,
}  # fmt: skip

STACK = {"input_size": 13, "channels": 6, "dim_k": 5, "dim_ff": 7, "nhead": 2, "depth": 2}
CAUSAL = {**STACK, "input_size": 12, "dim_k": 4, "causal": True, "block_size": 3}
TEXT = {"num_tokens": 11}
TORCH = {
    **{
        f"attention-{method}-{sharing}": (
            "LinearMultiheadAttention",
            {"embed_dim": 6, "num_heads": 2, "seq_len": 13, "proj_k": 5, "batch_first": True, "method": method,
             "param_sharing": sharing},
        )
        for method in ("learnable", "no_params", "convolution")
        for sharing in ("none", "headwise", "kv")
    },
    "attention-causal": (
        "LinearMultiheadAttention",
        {"embed_dim": 6, "num_heads": 2, "seq_len": 12, "proj_k": 4, "batch_first": True, "causal": True, "block_size": 3},
    ),
    **{
        f"stack-{sharing}": ("Linformer", {**STACK, "parameter_sharing": sharing, "local_kernel": 3})
        for sharing in ("none", "headwise", "kv", "layerwise")
    },
    "stack-fewer": ("Linformer", {**STACK, "k_reduce_by_layer": 2, "method": "no_params"}),
    "stack-window": ("Linformer", {**STACK, "local_window": 3, "parameter_sharing": "kv"}),
    "language": ("LinformerLM", {**TEXT, **STACK}),
    **{
        f"language-causal-{sharing}": ("LinformerLM", {**TEXT, **CAUSAL, "parameter_sharing": sharing})
        for sharing in ("none", "layerwise")
    },
    "classifier": ("LinformerClassifier", {**TEXT, **STACK, "num_classes": 3, "parameter_sharing": "kv"}),
    "seq2seq": (
        "LinformerEncDec",
        {"enc_num_tokens": 11, "enc_input_size": 13, "enc_channels": 6, "dec_num_tokens": 11, "dec_input_size": 12,
         "dec_channels": 6, "enc_dim_k": 5, "dec_dim_k": 4, "dec_block_size": 3, "nhead": 2, "depth": 2},
    ),
}  # fmt: skip
CLASSES = {
    c.__name__: c for c in (LinearMultiheadAttention, Linformer, LinformerLM, LinformerClassifier, LinformerEncDec)
}

EXCHANGED = (
    "attention-learnable-none",
    "attention-no_params-headwise",
    "attention-learnable-kv",
    "attention-convolution-none",
)
HF = {
    "masked": ("LinformerForMaskedLM", {"sharing": "none"}),
    "causal": ("LinformerForCausalLM", {"sharing": "layerwise", "block_size": 3, "is_decoder": True}),
    "seq2seq": ("LinformerForSeq2SeqLM", {"sharing": "kv", "block_size": 3, "is_encoder_decoder": True,
                                           "decoder_start_token_id": 1}),
    "labels": ("LinformerForSequenceClassification", {"sharing": "headwise", "num_labels": 3}),
}  # fmt: skip
HF_SIZES = {
    "vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7,
    "max_position_embeddings": 12, "proj_k": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def inputs_of(kind: str, length: int) -> tuple[torch.Tensor, ...]:
    """What a model of this class is given: channels, or tokens."""
    torch.manual_seed(3)
    if kind == "LinearMultiheadAttention":
        return (torch.randn(2, length, 6),) * 3
    if kind == "Linformer":
        return (torch.randn(2, length, 6),)
    return (torch.randint(3, 11, (2, length)),) * (2 if kind in ("LinformerEncDec", "LinformerForSeq2SeqLM") else 1)


def write_torch(out: Path) -> None:
    """State dicts, their settings, and outputs at two lengths."""
    out.mkdir(parents=True)
    for name, (kind, options) in TORCH.items():
        torch.manual_seed(1)
        model = CLASSES[kind](**options).eval()
        found = {f"state.{key}": value.contiguous() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for length in (7, 12):
                given = inputs_of(kind, length)
                result = model(*given)
                found |= {
                    f"input.{length}": given[0],
                    f"output.{length}": result[0] if type(result) is tuple else result,
                }
        save_file({key: value.clone() for key, value in found.items()}, out / f"{name}.safetensors")
    (out / "settings.json").write_text(json.dumps(TORCH, indent=1) + "\n", encoding="utf-8")


def write_hf(out: Path) -> None:
    """Saved Hugging Face models, and their logits."""
    import linformers.hf as hf

    for name, (kind, options) in HF.items():
        torch.manual_seed(1)
        model = getattr(hf, kind)(hf.LinformerConfig(**HF_SIZES, **options)).eval()
        model.save_pretrained(out / name)
        write_logits(model, inputs_of(kind, 11), out / name)


def write_linearized(out: Path) -> None:
    """A linearised BERT, and an encoder layer of torch's own with its attention replaced."""
    import transformers

    from linformers.linearize import linearize

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=7,
        max_position_embeddings=13, pad_token_id=0,
    )  # fmt: skip
    for name, sharing in (("bert-kv", "kv"), ("bert-none", "none")):
        model = transformers.BertForSequenceClassification(config).eval()
        linearize(model, k=5, max_len=13, sharing=sharing)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(out / name)
        write_logits(model, inputs_of("bert", 11), out / name)
    encoder = torch.nn.TransformerEncoderLayer(6, 2, 7, batch_first=True).eval()
    linearize(encoder, k=5, max_len=13)
    x = torch.randn(2, 11, 6)
    with torch.no_grad():
        found = {f"state.{key}": value.clone() for key, value in encoder.state_dict().items()}
        save_file({**found, "input": x, "output": encoder(x)}, out / "encoder.safetensors")


def write_logits(model: torch.nn.Module, given: tuple[torch.Tensor, ...], out: Path) -> None:
    """The logits of a Hugging Face model for one batch, and the batch."""
    names = ("input_ids", "decoder_input_ids")
    with torch.no_grad():
        logits = model(**dict(zip(names, given, strict=False))).logits
    save_file({"input": given[0].clone(), "output": logits.clone()}, out / "expected.safetensors")


def write_keras(out: Path) -> None:
    """A classifier, and the layers that :func:`linformers.keras.from_torch` makes of the saved state dicts."""
    import keras
    import numpy as np

    from linformers.keras import Linformer as KerasLinformer
    from linformers.keras import from_torch

    out.mkdir(parents=True)
    keras.utils.set_random_seed(1)
    tokens = np.array([[5, 2, 7, 1, 0, 0, 0], [3, 3, 1, 4, 2, 6, 1]], "int32")
    model = KerasLinformer(
        k=3, max_len=7, vocab_size=8, d_model=6, d_ff=5, n_heads=2, n_layers=2, dropout=0.1, full_attn=False
    )
    found = {
        "classifier.input": torch.tensor(tokens),
        "classifier.output": torch.tensor(model.predict(tokens, verbose=0)),
    }
    model.save(out / "classifier.keras")
    for name, (kind, options) in TORCH.items():
        if name in EXCHANGED:
            torch.manual_seed(1)
            layer = from_torch(LinearMultiheadAttention(**options).eval(), name="converted")
            x = inputs_of(kind, 12)[0].numpy()
            place = keras.Input((None, 6))
            made = keras.Model(place, layer(place, place))
            found |= {f"{name}.input": torch.tensor(x), f"{name}.output": torch.tensor(made.predict(x, verbose=0))}
            made.save(out / f"{name}.keras")
    save_file(found, out / "expected.safetensors")


def write_runs(out: Path) -> None:
    """One run of each task, stopped after step 4 of 6 with its checkpoint of step 3; and the loss and weights of one that was not."""
    from linformers.training import Settings, train
    from linformers.training.trainer import RunTrainer

    class Crash(BaseException):
        pass

    step = RunTrainer.training_step

    def crashing(self, *args, **options):
        loss = step(self, *args, **options)
        if self.state.global_step == 4:
            raise Crash
        return loss

    drawn = random.Random(4)
    for task, sharing in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / ("text.csv" if task == "classify" else "text.txt")
            lines = [" ".join(drawn.choices(WORDS, k=drawn.randint(12, 20))) for _ in range(40)]
            given = {}
            if task == "classify":
                lines = ["text,label", *(f"{line},{'cat' if 'cat' in line else 'none'}" for line in lines)]
            if task == "seq2seq":
                (Path(folder) / "targets.txt").write_text("\n".join(line[::-1] for line in lines), encoding="utf-8")
                given = {"targets": (str(Path(folder) / "targets.txt"),)}
            data.write_text("\n".join(lines), encoding="utf-8")
            block = {"block_size": 4} if task in ("clm", "seq2seq") else {}
            settings = Settings(task=task, data=(str(data),), sharing=sharing, **SETTINGS, **given, **block)
            whole = Path(folder) / "whole"
            train(settings, whole, progress=False)
            RunTrainer.training_step = crashing
            try:
                train(settings, Path(folder) / "run", progress=False)
            except Crash:
                pass
            finally:
                RunTrainer.training_step = step
            run = out / task
            shutil.copytree(Path(folder) / "run", run, ignore=shutil.ignore_patterns("tensorboard"))
            results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
            (out / f"{task}.json").write_text(json.dumps({"loss": results["loss"]}) + "\n", encoding="utf-8")
            shutil.copy(whole / "final" / "model.safetensors", out / f"{task}.safetensors")
            for path in (run / "config.json", run / "data" / "prepared.json"):
                path.write_text(path.read_text(encoding="utf-8").replace(folder, "FOLDER"), encoding="utf-8")


def main() -> None:
    out = Path(sys.argv[1])
    for write in (write_torch, write_hf, write_linearized, write_keras, write_runs):
        folder = out / write.__name__.removeprefix("write_")
        if not folder.exists():
            write(folder)


if __name__ == "__main__":
    main()
