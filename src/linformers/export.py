"""Export saved models to files that run without this package, ONNX or torch.export programs; each is compared with its model first.

Axes: b batch, o choices, n positions, t target positions.

What is exported is the whole forward pass in float32 and eval mode, from token ids and masks (or pixels) to every output tensor; batch and length
are dynamic. Exported causal models have no decoding state: each call reads the whole sequence.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from linformers.checks import one_of
from linformers.extras import require
from linformers.files.checked import read_object
from linformers.files.whole import beside, scratch
from linformers.linearize.positions import room
from linformers.pretrained import load as pretrained

__all__ = ["Check", "Exported", "export", "load"]

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = 1e-4
LARGEST_FILE = 1_900_000_000  # a protobuf, and so a single ONNX file, is limited to 2 GB

# Of a model without a maximum length: that of its export, because torch's attention in a graph takes no more, and of the inputs it is compared with.
LONGEST, LONGEST_COMPARED = 65_535, 96

Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Check:
    """The largest difference between export and model on one input, over all outputs at real tokens."""

    batch: int
    length: int
    masked: str  # "whole", "padded" or "left-padded"
    error: float

    def __str__(self) -> str:
        return f"batch {self.batch}, length {self.length}, {self.masked}: largest difference {self.error:.1e}"


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    path: Path
    size: int  # bytes, external data included
    inputs: list[str]
    outputs: list[str]
    max_len: int | None  # None for images, which have one size
    checks: list[Check] = field(default_factory=list)

    def __str__(self) -> str:
        lengths = "" if self.max_len is None else f", lengths from 1 to {self.max_len}"
        return f"{self.path} ({self.size / 1e6:.1f} MB): {', '.join(self.inputs)} -> {', '.join(self.outputs)}{lengths}"


class TextForward(nn.Module):
    """The exported function of a model: tensors in, a tuple of tensors out.

    Args:
        max_len: the longest input of the model; None for any.
        target_len: its longest target; None for any, or for no targets.
    """

    names: tuple[str, ...] = ("input_ids", "attention_mask")

    def __init__(self, model: Any, max_len: int | None, target_len: int | None = None) -> None:
        super().__init__()
        self.model, self.max_len, self.target_len = model, max_len or LONGEST, target_len or LONGEST
        self.compared = max_len or LONGEST_COMPARED  # the longest input that is compared
        self.outputs: list[str] = []

    def answer(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """All output tensors of the model."""
        found = {name: value for name, value in self.model(**inputs).items() if isinstance(value, Tensor)}
        if not torch.compiler.is_exporting():
            self.outputs = [*found]
        return tuple(found.values())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.answer(input_ids=input_ids, attention_mask=attention_mask)


class TypedForward(TextForward):
    """The same for a model with token types."""

    names = ("input_ids", "attention_mask", "token_type_ids")

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, ...]:
        return self.answer(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


class Seq2SeqForward(TextForward):
    """The same for an encoder and a decoder."""

    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor
    ) -> tuple[Tensor, ...]:
        return self.answer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
        )


class ImageForward(TextForward):
    """The same for images of one size."""

    names = ("pixel_values",)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self.answer(pixel_values=pixel_values)


def load(directory: str | os.PathLike[str]) -> Any:
    """Load the model of a run, or of a directory that ``save_pretrained`` wrote, in the class that it was saved in.

    Raises:
        ValueError: for a model that is neither of :mod:`linformers.hf` nor linearised.
    """
    place = model_directory(Path(directory))
    config = read_object(place / "config.json", optional=pretrained.OF_CONFIG, advice=pretrained.ADVICE)
    model_type, names = config.get("model_type", ""), config.get("architectures") or [""]
    known: Any = None
    if model_type == "linformer":
        import linformers.hf as known
    elif model_type.startswith("linformers-"):
        import linformers.linearize.encoders as known
    kind = pretrained.saved_class(names[:1], known)
    if kind is None:
        raise ValueError(
            f"{place} holds {names[0] or 'a model'} of type {model_type!r}; export takes the models of linformers.hf and those that "
            "`linformers linearize` wrote"
        )
    return pretrained.load_model(kind, place)


def model_directory(directory: Path) -> Path:
    """Where the weights are: a run keeps them in ``final``.

    Raises:
        ValueError: if there is no model.
    """
    for place in (directory / "final", directory):
        if (place / "config.json").is_file() and any(place.glob("*.safetensors")):
            return place
    raise ValueError(
        f"{directory} has no model (config.json and *.safetensors, there or in final/); give a finished run, or a directory that "
        "save_pretrained wrote"
    )


def export(
    model: Any,
    path: str | os.PathLike[str],
    *,
    format: str = "onnx",  # noqa: A002 - the name of the command's option
    force: bool = False,
    tolerance: float = TOLERANCE,
    external_data: bool | None = None,
    told: Callable[[Check], None] = lambda check: None,
) -> Exported:
    """Write ``model`` to a file, read it back, and compare it with the model at several lengths and batch sizes.

    The file appears under its name only if every check has passed.

    Args:
        model: of :mod:`linformers.hf`, or linearised by :func:`linformers.linearize.linearize`; converted to float32 and eval mode.
        path: the file.
        format: ``"onnx"`` or ``"torch-export"``.
        force: overwrite an existing file.
        tolerance: the largest difference allowed, as a share of the largest output (or of 1, if that is more).
        external_data: ONNX with its weights in a second file, ``path`` with ``.data`` appended; None does so from 2 GB on.
        told: called with the result of every check.

    Raises:
        TypeError: for what is not a module.
        ValueError: for an unknown kind of model, an existing file, or an export whose outputs differ from the model's.
        ImportError: for ONNX without the packages that it needs.
    """
    one_of("format", format, tuple(SUFFIXES))
    if external_data and format != "onnx":
        raise ValueError(f"external_data is for format=onnx, and {format} writes one file; leave it out")
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model of linformers.hf, or one that was linearised, got {type(model).__name__}")
    path = Path(path)
    if path.exists() and not force:
        raise ValueError(f"{path} already exists; choose another file with --out, or overwrite it with --force")
    if format == "onnx":
        need("onnx", "onnxscript", "onnxruntime")
    forward = wrap(model.float().eval())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    external = weights > LARGEST_FILE if external_data is None else external_data
    with scratch(beside(path)) as aside:
        run = write(forward, aside / path.name, format, external)
        checks = []
        for check in compare(forward, run, tolerance):
            checks.append(check)
            told(check)
        files = sorted(aside.iterdir(), reverse=True)  # the weights before the graph that names them
        size = sum(file.stat().st_size for file in files)
        for file in files:
            file.replace(path.with_name(file.name))
    longest = None if isinstance(forward, ImageForward) else forward.max_len
    return Exported(path, size, list(forward.names), forward.outputs, longest, checks)


def need(*packages: str) -> None:
    """Raise an ImportError if one of the packages is missing."""
    require("ONNX", "export", *packages)


def wrap(model: Any) -> TextForward:
    """Wrap the forward pass of a model, chosen by the inputs that it takes.

    Raises:
        ValueError: for a model that is neither of :mod:`linformers.hf` nor linearised.
    """
    config: Any = getattr(model, "config", None)
    for name in ("output_attentions", "output_hidden_states", "use_cache"):
        if getattr(config, name, None):
            setattr(config, name, False)
    settings = getattr(config, "linformers", None)
    if getattr(config, "model_type", None) == "linformer":
        for part in model.modules():  # an encoder and a decoder have configurations of their own
            if getattr(getattr(part, "config", None), "use_cache", None):
                part.config.use_cache = False
        if config.is_encoder_decoder:
            return Seq2SeqForward(model, config.max_position_embeddings, config.max_target_positions)
        kind = TypedForward if config.type_vocab_size > 1 else TextForward
        return kind(model, config.max_position_embeddings)
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"cannot export {type(model).__name__}; only models of linformers.hf and models made by linformers.linearize can be exported"
        )
    if config.model_type == "linformers-vit":
        return ImageForward(model, settings["max_len"])
    longest = min(settings["max_len"], room(config) or settings["max_len"])
    typed = config.model_type in ("linformers-bert", "linformers-electra") and config.type_vocab_size > 1
    return (TypedForward if typed else TextForward)(model, longest)


def write(forward: TextForward, path: Path, format: str, external: bool) -> Run:  # noqa: A002
    """Export to ``path``, and return a function that runs the file."""
    example, shapes = make_inputs(forward, 2, example_length(forward.compared)), dynamic_shapes(forward)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its internals and about names that two inputs share
        forward(**example)  # records the names of the outputs
        program = torch.export.export(forward, (), example, dynamic_shapes=shapes, strict=False)
        if format == "torch-export":
            torch.export.save(program, path)
            module = torch.export.load(path).module()
            return lambda inputs: dict(zip(forward.outputs, module(**inputs), strict=True))
        converted = torch.onnx.export(
            program,
            (),
            kwargs=example,
            input_names=list(forward.names),
            output_names=forward.outputs,
            dynamo=True,
            verbose=False,
        )
    if converted is None:
        raise ValueError("torch.onnx.export returned no program")
    converted.save(path, external_data=external)
    return onnx_runner(path, forward.outputs)


def onnx_runner(path: Path, outputs: list[str]) -> Run:
    """A function that runs an ONNX file."""
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taken = {each.name for each in session.get_inputs()}

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: tensor.numpy() for name, tensor in inputs.items() if name in taken}
        return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, given)), strict=True))

    return run


def example_length(max_len: int) -> int:
    """A length for the example input that is no special case, such as 1 or the maximum, where possible."""
    return max(1, min(max_len, 7 + max_len // 3))


def dynamic_shapes(forward: TextForward) -> dict[str, dict[int, Any]]:
    """The dynamic axes of each input, with their ranges."""
    batch = Dim("batch", min=1, max=2**20)
    if isinstance(forward, ImageForward):
        return {"pixel_values": {0: batch}}
    length = Dim("length", min=1, max=forward.max_len)
    target = Dim("target_length", min=1, max=forward.target_len)
    choices = {1: Dim("choices", min=1, max=1024)} if is_choice(forward.model) else {}
    return {
        name: {0: batch, **choices, 1 + len(choices): target if name.startswith("decoder") else length}
        for name in forward.names
    }


def is_choice(model: nn.Module) -> bool:
    """Whether a model takes several texts for one answer, ``(b, o, n)``."""
    return type(model).__name__.endswith("ForMultipleChoice")


def make_inputs(
    forward: TextForward, batch: int, length: int, masked: str = "padded", seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs of ``length`` positions; a target is cut to its maximum length."""
    g = torch.Generator().manual_seed(seed)
    config = forward.model.config
    if isinstance(forward, ImageForward):
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        return {"pixel_values": torch.randn(batch, config.num_channels, *size, generator=g)}
    choices = (3,) if is_choice(forward.model) else ()
    # No padding tokens: RoBERTa counts the positions of other tokens only.
    low = min(1 + max(-1, config.pad_token_id or -1), config.vocab_size - 1)
    inputs = {}
    for name in forward.names:
        n = min(length - (length > 4), forward.target_len) if name.startswith("decoder") else length
        shape = (batch, *choices, n)
        if name.endswith("mask"):
            real = torch.randint(1, n + 1, (*shape[:-1], 1), generator=g) if masked != "whole" else torch.tensor(n)
            places = torch.arange(n) if masked != "left-padded" else torch.arange(n).flip(0)
            inputs[name] = (places < real).expand(shape).long()
        elif name == "token_type_ids":
            inputs[name] = torch.randint(config.type_vocab_size, shape, generator=g)
        else:
            inputs[name] = torch.randint(low, config.vocab_size, shape, generator=g)
    return inputs


@torch.no_grad()
def compare(forward: TextForward, run: Run, tolerance: float) -> Iterator[Check]:
    """Run the model and its export on the same inputs, of several sizes.

    Raises:
        ValueError: if they differ by more than ``tolerance``.
    """
    longest = forward.compared
    sizes = sorted({(1, 1), (3, min(2, longest)), (1, longest), (2, example_length(longest)), (3, (longest + 1) // 2)})
    if isinstance(forward, ImageForward):
        sizes = [(1, longest), (3, longest)]
    causal = getattr(forward.model.config, "is_decoder", False)
    kinds = ("whole",) if isinstance(forward, ImageForward) else ("whole", "padded", *["left-padded"] * causal)
    for seed, (batch, length) in enumerate(sizes):
        for masked in kinds:
            inputs = make_inputs(forward, batch, length, masked, seed)
            goals = forward(**inputs)
            expected, found = dict(zip(forward.outputs, goals, strict=True)), run(inputs)
            error = 0.0
            for name, goal in expected.items():
                if found[name].shape != goal.shape:
                    raise ValueError(
                        f"the export returns {name} of shape {tuple(found[name].shape)}, the model as {tuple(goal.shape)}"
                    )
                real = real_places(name, goal, inputs)
                difference = float((found[name] - goal)[real].abs().max())
                error = max(error, difference)
                if not difference <= tolerance * max(1.0, float(goal[real].abs().max())):
                    raise ValueError(
                        f"the export differs from the model: {name} at batch {batch}, length {length}, {masked}, by "
                        f"{difference:.1e}, and the tolerance is {tolerance:g}"
                    )
            yield Check(batch, length, masked, error)


def real_places(name: str, output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Where an output is compared: at real tokens, if it has positions."""
    mask = inputs.get("attention_mask")
    if "decoder_attention_mask" in inputs and not name.startswith("encoder"):
        mask = inputs["decoder_attention_mask"]
    by_position = output.dim() == 3 or name in ("start_logits", "end_logits")
    if mask is None or not by_position or mask.shape != output.shape[:2]:
        return torch.ones(output.shape[:1], dtype=torch.bool)
    return mask.bool()
