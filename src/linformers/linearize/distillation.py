"""``distill``: train a linearised model to reproduce the original; resumable at every step.

Axes: b batch, n positions.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from linformers.checks import finite, given, not_negative, one_of, whole
from linformers.files.checked import an_object, damaged, each, fields, number, open_regular, parse, reading
from linformers.files.whole import whole_file
from linformers.linearize.calibrate import Batch, check_batches, run
from linformers.linearize.surgery import evaluating
from linformers.nn.multihead import LinearMultiheadAttention
from linformers.projections.base import Projection

TRAIN = ("projections", "attention", "all")
ABOUT = {
    "run": an_object,
    "before": fields(dict.fromkeys(("hidden", "attention", "output"), number()), only=True),
    "losses": each(number(finite=False)),
}


@dataclass(frozen=True)
class Figures:
    """How far a student is from its teacher: squared distances over squared sizes, averaged over layers and batches."""

    hidden: float
    attention: float
    output: float

    def __str__(self) -> str:
        return f"hidden states {self.hidden:.4f}, attention {self.attention:.4f}, output {self.output:.4f}"


@dataclass(frozen=True)
class Distillation:
    """What a distillation did: its figures on the held-out batches before and after, and the loss of every step."""

    before: Figures
    after: Figures
    losses: list[float]

    def __str__(self) -> str:
        return f"before: {self.before}\nafter:  {self.after}"


def distill(
    student: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch],
    *,
    steps: int,
    held_out: Sequence[Batch] | None = None,
    train: str = "all",
    lr: float = 3e-4,
    projection_lr: float = 3e-3,
    warmup: float = 0.1,
    hidden: float = 1.0,
    attention: float = 1.0,
    output: float = 1.0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    progress: bool = True,
) -> Distillation:
    """Train ``student``, a linearised copy of ``teacher``, to give the teacher's hidden states, attention outputs and outputs.

    Both run in eval mode, without dropout. Step i takes batch ``i mod len(batches)``. An interrupted run continues from its checkpoint,
    and ends with the same weights as an uninterrupted one.

    Args:
        student: from :func:`linformers.linearize.linearize`; trained in place.
        teacher: the original; not changed.
        batches: inputs: each a dictionary of arguments, a sequence of them, or a tensor. Padding is left out of the loss if there is an
            ``attention_mask`` ``(b, n)`` among the arguments.
        steps: the number of updates; the learning rate rises over the first ``warmup`` (a share of them) and falls to zero as a cosine.
        held_out: batches for the figures before and after; None takes the first few of ``batches``.
        train: ``"projections"`` alone, all of the replaced ``"attention"``, or ``"all"`` parameters.
        lr: the learning rate of the weights that the teacher has too.
        projection_lr: the learning rate of the projections, which are new.
        hidden: weight of the distance between the outputs of the layers.
        attention: weight of the distance between the outputs of the replaced attention.
        output: weight of the distance between the outputs of the models.
        checkpoint: a file (safetensors) to continue from and to write to.
        every: steps between two checkpoints.
        progress: show a bar, if ``rich`` is installed.

    Raises:
        ValueError: if the student has no linearised attention, a layer of it is not in the teacher, or the checkpoint is of another run.
    """
    one_of("train", train, TRAIN)
    given(steps=steps, every=every)
    whole(steps=steps, every=every)
    rates = {"lr": lr, "projection_lr": projection_lr, "warmup": warmup}
    shares = {"hidden": hidden, "attention": attention, "output": output}
    given(**rates, **shares)
    finite(**rates, **shares)
    not_negative(**rates)
    if steps < 0 or every < 1:
        raise ValueError(f"steps must not be negative and every must be at least 1, got {steps} and {every}")
    check_batches("batches", batches)
    check_batches("held_out", held_out)
    if not batches:
        raise ValueError("got no batches; give at least one")
    if held_out is not None and not held_out:
        raise ValueError("held_out has no batches; give at least one, or leave it out")
    watched = Watched(student, teacher)
    weights = {"hidden": hidden, "attention": attention, "output": output}
    groups = _parameters(student, watched, train, lr, projection_lr)
    held_out = batches[:8] if held_out is None else held_out
    optimizer = torch.optim.AdamW(
        [{"params": list(group.values()), "lr": rate} for group, rate in groups], weight_decay=0.0
    )
    named = {name: parameter for group, _ in groups for name, parameter in group.items()}
    run_of = {
        "steps": steps,
        "batches": len(batches),
        "train": train,
        "lr": lr,
        "projection_lr": projection_lr,
        "warmup": warmup,
    }
    run_of |= {"weights": weights}
    frozen = [p for p in student.parameters() if p.requires_grad and not any(p is q for q in named.values())]
    with evaluating(student), evaluating(teacher), _frozen(frozen):
        losses: list[float] = []
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None and path.exists():
            before, losses = _load(path, run_of, named, optimizer)
        else:
            before = figures(watched, held_out)
        with _bar(progress, steps, len(losses)) as advance:
            for step in range(len(losses), steps):
                distances = watched.distances(batches[step % len(batches)])
                loss = torch.stack([weights[name] * value for name, value in distances.items()]).sum()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(named.values(), 1.0)
                for group, (_, rate) in zip(optimizer.param_groups, groups, strict=True):
                    group["lr"] = rate * _rate(step, steps, warmup)
                optimizer.step()
                losses.append(float(loss.detach()))
                advance(losses[-1])
                if path is not None and (step + 1) % every == 0 and step + 1 < steps:
                    _save(path, run_of, before, losses, named, optimizer)
        optimizer.zero_grad()
        if path is not None:
            _save(path, run_of, before, losses, named, optimizer)
        return Distillation(before, figures(watched, held_out), losses)


@torch.no_grad()
def figures(watched: "Watched", batches: Sequence[Batch]) -> Figures:
    """The mean distances on some batches."""
    totals = {"hidden": 0.0, "attention": 0.0, "output": 0.0}
    for batch in batches:
        for name, value in watched.distances(batch).items():
            totals[name] += float(value) / len(batches)
    return Figures(**totals)


class Watched:
    """A student and its teacher, and where their replaced attention and the layers around it are."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        self.student, self.teacher = student, teacher
        self.attention = [name for name, module in student.named_modules() if is_linearized(module)]
        if not self.attention:
            raise ValueError(f"{type(student).__name__} has no linearised attention; call linearize first")
        inside_teacher = dict(teacher.named_modules())
        for name in self.attention:
            if name not in inside_teacher:
                raise ValueError(
                    f"the teacher, {type(teacher).__name__}, has no module {name!r}; it must be the original"
                )
            if is_linearized(inside_teacher[name]):
                raise ValueError(f"{name!r} of the teacher is linearised too; keep a copy of the original as teacher")
        self.layers = sorted({layer for name in self.attention if (layer := layer_of(student, name))})

    def distances(self, batch: Batch) -> dict[str, Tensor]:
        """The relative squared distances of hidden states, attention outputs and outputs for one batch."""
        with torch.no_grad():
            goal = self._outputs(self.teacher, batch)
        got = self._outputs(self.student, batch)
        keep = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        result = {}
        for kind, names in (("hidden", self.layers), ("attention", self.attention)):
            each = [distance(got[name], goal[name], keep) for name in names]
            result[kind] = torch.stack(each).mean() if each else got[""].new_zeros(())
        result["output"] = distance(got[""], goal[""], keep)
        return result

    def _outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The outputs of the layers and of the replaced attention by name; that of the model under the empty name."""
        seen: dict[str, Tensor] = {}
        handles = []
        modules = dict(model.named_modules())
        for name in {*self.layers, *self.attention}:

            def keep_output(module: nn.Module, args: Any, result: Any, name: str = name) -> None:
                seen[name] = first_tensor(result)

            handles.append(modules[name].register_forward_hook(keep_output))
        try:
            seen[""] = first_tensor(run(model, batch))
        finally:
            for handle in handles:
                handle.remove()
        return seen


def is_linearized(module: nn.Module) -> bool:
    """Whether this is an attention that attends to slots: torch's replaced one, or one of Hugging Face's with a projection."""
    return isinstance(module, LinearMultiheadAttention) or isinstance(
        dict(module.named_children()).get("projection"), Projection
    )


def layer_of(model: nn.Module, name: str) -> str:
    """The nearest module around an attention that is an entry of a list of modules: the layer whose output is a hidden state."""
    while name:
        parent, _, _ = name.rpartition(".")
        if isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential):
            return name
        name = parent
    return ""


def first_tensor(result: Any) -> Tensor:
    """The main output of a module: the tensor that it returns, the first of several, or the first named output that is not a loss."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        result = [value for name, value in result.items() if name != "loss"]
    tensors = [value for value in result if isinstance(value, Tensor) and value.is_floating_point()]
    if not tensors:
        raise ValueError(f"cannot compare outputs without a tensor in them; got {type(result).__name__}")
    return tensors[0]


def distance(got: Tensor, goal: Tensor, keep: Tensor | None) -> Tensor:
    """The squared distance over the squared size; of real tokens only where the axes are ``(b, n, ...)``."""
    if goal.is_nested:
        got, goal = got.to_padded_tensor(0.0), goal.to_padded_tensor(0.0)
    difference, size = (got - goal).square(), goal.square()
    if keep is not None and goal.dim() > 2 and goal.shape[:2] == keep.shape:
        real = keep.to(goal.dtype)[..., None]
        difference, size = difference * real, size * real
    return difference.sum() / size.sum().clamp(min=torch.finfo(goal.dtype).tiny)


def _parameters(
    student: nn.Module, watched: Watched, train: str, lr: float, projection_lr: float
) -> list[tuple[dict[str, nn.Parameter], float]]:
    """The parameters to train, by name, with the learning rate of each group."""
    new: dict[str, nn.Parameter] = {}
    old: dict[str, nn.Parameter] = {}
    for name, parameter in student.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = next((a for a in watched.attention if name.startswith(f"{a}.")), None)
        if owner is not None and name.startswith(f"{owner}.projection."):
            new[name] = parameter
        elif train == "all" or (train == "attention" and owner is not None):
            old[name] = parameter
    groups = [(group, rate) for group, rate in ((old, lr), (new, projection_lr)) if group]
    if not groups:
        raise ValueError(
            f"train={train!r}, but there is nothing to train: linearize with method='learnable' or 'content', or train='attention' or 'all'"
        )
    return groups


def _rate(step: int, steps: int, warmup: float) -> float:
    """The share of the full learning rate at one step."""
    rising = max(1, int(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - rising) / max(1, steps - rising)))))


def _save(
    path: Path,
    run_of: dict[str, Any],
    before: Figures,
    losses: list[float],
    named: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write weights, the optimiser's moments and the figures to one file."""
    tensors = {}
    for name, parameter in named.items():
        tensors[f"weight/{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().contiguous()
    about = {"run": run_of, "before": vars(before), "losses": losses}
    with whole_file(path) as aside:
        save_file(tensors, aside, metadata={"distillation": json.dumps(about)})


def _load(
    path: Path, run_of: dict[str, Any], named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[Figures, list[float]]:
    """Restore what :func:`_save` wrote.

    Raises:
        ValueError: if it is of another run.
    """
    open_regular(path).close()  # safetensors would block on a pipe
    with reading(path, "check the path, or choose another file"), safe_open(path, framework="pt") as file:
        about = parse((file.metadata() or {}).get("distillation", "{}"), path)
        with damaged(path):
            fields({}, ABOUT)(about, "")
        for key, value in run_of.items():
            if about.get("run", {}).get(key) != value:
                was = about.get("run", {}).get(key)
                raise ValueError(
                    f"{path} is from a run with {key}={was}, not {value}; continue that run, or choose another file"
                )
        with damaged(path):
            fields(ABOUT)(about, "")
            if len(about["losses"]) > run_of["steps"]:
                raise ValueError(f"it has the losses of {len(about['losses'])} steps of {run_of['steps']}")
        stored = set(file.keys())
        names = {key.partition("/")[2] for key in stored}
        if names != set(named):
            raise ValueError(f"{path} trains {len(names)} tensors, this run {len(named)}: it is of another model")
        for name, parameter in named.items():
            weight = file.get_tensor(f"weight/{name}")
            if weight.shape != parameter.shape:
                raise ValueError(
                    f"{path} has {name} as {tuple(weight.shape)}, the student as {tuple(parameter.shape)}: it is of another model"
                )
            with torch.no_grad():
                parameter.copy_(weight)
            if f"step/{name}" in stored:  # a parameter that has had no gradient yet has no moments
                state = {key: file.get_tensor(f"{key}/{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                shapes = [value.shape for key, value in state.items() if key != "step"]
                if any(shape != parameter.shape for shape in shapes) or state["step"].numel() != 1:
                    raise ValueError(f"{path} has moments of {name} of other shapes than its weights")
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter) for key, value in state.items()
                }
    return Figures(**about["before"]), list(about["losses"])


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leave some parameters out of the backward pass."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def _bar(show: bool, steps: int, done: int) -> Iterator[Callable[[float], None]]:
    """A progress bar with the loss, or nothing where ``rich`` is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        show = False
    if not show:
        yield lambda loss: None
        return
    columns = (TextColumn("distilling"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("distilling", total=steps, completed=done, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)
