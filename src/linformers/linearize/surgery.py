"""``linearize``: replace the full self-attention of a trained model, in place, and keep its weights.

Axes: n positions, k slots.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from linformers.checks import shown
from linformers.linearize import modules
from linformers.linearize.calibrate import Batch, Sample, check_batches, fit
from linformers.linearize.plan import Plan, check, plain
from linformers.linearize.positions import check_positions, stretch
from linformers.linearize.projection import exact_keys
from linformers.linearize.report import Left, Replaced, Report
from linformers.projections.base import Projection


def linearize(
    model: nn.Module,
    *,
    k: int | Sequence[int] | str,
    max_len: int,
    method: str = "mean",
    sharing: str = "headwise",
    local_window: int = 0,
    open_slots: int = 0,
    causal: str = "leave",
    cross: str = "leave",
    block_size: int | None = None,
    layers: Sequence[int | str] | None = None,
    calibration: Sequence[Batch] | None = None,
    share: float = 0.9,
    fit_steps: int = 0,
    positions: str = "keep",
) -> Report:
    """Replace full self-attention by attention to k slots, in place, keeping the trained queries, keys, values and outputs.

    It finds ``nn.MultiheadAttention`` anywhere in ``model``, and the self-attention of Hugging Face's BERT, RoBERTa, DistilBERT, ELECTRA,
    ViT and ModernBERT (its global layers). The latter become classes of their own, ``LinearizedBertModel`` and so on, with
    ``save_pretrained`` and ``from_pretrained``; a model of plain torch is loaded by building it, linearising it in the same way, and loading
    its state dict.

    At the start every slot is the mean of some real tokens (see :class:`linformers.linearize.TokenMeans`): an input with at most k of them
    is attended to exactly, so that the outputs of short inputs do not change, and k = ``max_len`` changes nothing.

    Args:
        model: changed in place.
        k: the number of slots of every attention; or a list with that of each attention that is replaced; or ``"spectrum"``, for each the
            smallest k that holds ``share`` of the sum of the singular values of its attention on the calibration inputs.
        max_len: the longest input.
        method: ``"mean"``, means of real tokens with nothing to train; ``"learnable"``, the same with a correction to be trained; or
            ``"content"``, slots to which tokens are assigned by their features (see :class:`linformers.projections.Content`). The assignment
            is random until it is trained, by ``fit_steps`` or by :func:`distill`, and inputs of at most k tokens are not exact.
        sharing: of the trained projections: ``"none"``, one for each head; ``"headwise"``; or ``"kv"``, one for keys and values (content slots
            always share it).
        local_window: also see the exact keys of the query's own and the neighbouring blocks of this many positions; for self-attention that
            is not causal.
        open_slots: each query replaces this many of its best slots by the exact keys they stand for; with ``method="mean"``. It needs no
            training. A slot then counts for as many tokens as it holds.
        causal: the self-attention of decoders: ``"leave"`` it, make it ``"block"``-causal, or, if the model's decoder is not causal, replace
            it by bidirectional attention (``"absent"``, as for DETR).
        cross: ``"leave"`` cross-attention, or make it ``"linear"`` too.
        block_size: positions of a block of block-causal attention; None chooses one.
        layers: replace only these: numbers (of all attention that was found, from 0) or names, in which ``*`` stands for anything.
        calibration: inputs of the model: each a dictionary of arguments, a sequence of them, or a tensor.
        share: for ``k="spectrum"``.
        fit_steps: fit each learned projection in this many steps, so that the output of its attention on the calibration inputs is closest
            to the original.
        positions: ``"keep"`` the learned positions of a Hugging Face encoder, which then bound ``max_len``; or ``"stretch"`` them over
            longer inputs (see :func:`linformers.linearize.stretch_positions`).

    Returns:
        What was replaced and what was left alone, and why.

    Raises:
        ValueError: for sizes that do not fit, or if there is nothing to replace.

    Example:
        >>> import torch
        >>> from linformers.linearize import linearize
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
        >>> print(linearize(encoder, k=32, max_len=128))
        replaced 2, left 0 (inputs of at most 128 positions)
          + layers.0.self_attn  k = 32, mean
          + layers.1.self_attn  k = 32, mean
    """
    check_batches("calibration", calibration)
    plan = Plan(
        plain(k),
        plain(max_len),
        method,
        sharing,
        plain(local_window),
        plain(open_slots),
        causal,
        cross,
        plain(block_size),
        calibration or (),
        share,
        plain(fit_steps),
        positions,
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    check(plan)
    max_len = plan.max_len
    encoders = _encoders(model)
    for _, encoder in encoders:
        check_positions(encoder.config, max_len, positions)
    if positions == "stretch" and not encoders:
        raise ValueError(
            f"positions='stretch' is for Hugging Face encoders of text, and {type(model).__name__} holds none"
        )
    sites = [site for site in modules.find_sites(model) if not any(under(site.name, name) for name, _ in encoders)]
    found: list[tuple[str, str]] = []  # name, and why it is left alone
    for name, encoder in encoders:
        found += _attention_of(name, encoder, plan.method)
    found += [(site.name, modules.reason_to_leave(site, causal, cross)) for site in sites]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention that can be linearised; supported are nn.MultiheadAttention and Hugging Face's BERT, "
            "RoBERTa, DistilBERT, ELECTRA, ViT and ModernBERT (install linformers[hf] for those)"
        )
    found = select(found, layers)
    report = Report(max_len, left=[Left(name, why) for name, why in found if why])
    wanted = [name for name, why in found if not why]
    if not wanted:
        raise ValueError(f"nothing to replace in {type(model).__name__}:\n{report}")
    if not isinstance(plan.k, int | str) and len(plan.k) != len(wanted):
        raise ValueError(f"k lists {len(plan.k)} sizes for {len(wanted)} attentions: {', '.join(wanted)}")
    with evaluating(model):
        # Before calibration, whose inputs may be this long. With positions="keep" only the bound of rotary positions can change.
        report.positions = "; ".join(filter(None, (stretch(encoder, max_len) for _, encoder in encoders)))
        for name, encoder in encoders:
            report.replaced += _convert_encoder(model, name, encoder, plan, wanted)
        for site in sites:
            if site.name in wanted:
                report.replaced.append(_convert_site(model, site, plan, wanted.index(site.name)))
    return report


def select(found: Sequence[tuple[str, str]], layers: Sequence[int | str] | None) -> list[tuple[str, str]]:
    """Leave alone the attention that ``layers`` does not name.

    Raises:
        ValueError: for a number or a name that matches no attention.
    """
    if layers is None:
        return list(found)
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise TypeError(f"layers must be a list of numbers and names, got {shown(layers)}")
    asked: set[str] = set()
    for layer in plain(list(layers)):
        if isinstance(layer, bool) or not isinstance(layer, int | str):
            raise TypeError(f"layers must be a list of numbers and names, got {shown(layer)} in it")
        if isinstance(layer, int):
            fitting = [found[layer][0]] if 0 <= layer < len(found) else []
        else:
            fitting = [name for name, _ in found if fnmatchcase(name, layer)]
        if not fitting:
            known = ", ".join(f"{i} {name}" for i, (name, _) in enumerate(found))
            raise ValueError(f"layers: there is no attention {layer!r}; there are {known}")
        asked.update(fitting)
    return [(name, why if name in asked else "not among the layers asked for") for name, why in found]


def under(name: str, parent: str) -> bool:
    """Whether the module ``name`` is ``parent`` or inside it."""
    return not parent or name == parent or name.startswith(f"{parent}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block. Afterwards every module has its earlier mode again, and a new module that of the module around it."""
    training = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        yield
    finally:
        for name, module in model.named_modules():
            outer = name
            while outer not in training:  # a new module
                outer = outer.rpartition(".")[0]
            module.training = training[outer]


def _encoders(model: nn.Module) -> list[tuple[str, Any]]:
    if find_spec("transformers") is None:
        return []
    from linformers.linearize.encoders import find_encoders

    return list(find_encoders(model))


def _attention_of(prefix: str, encoder: Any, method: str) -> list[tuple[str, str]]:
    from linformers.linearize.encoders import attention_modules, reason_to_leave

    return [(join(prefix, name), reason_to_leave(module, method)) for name, module in attention_modules(encoder)]


def join(prefix: str, name: str) -> str:
    """The name of a module inside another."""
    return f"{prefix}.{name}" if prefix else name


def _convert_encoder(model: nn.Module, prefix: str, encoder: Any, plan: Plan, wanted: Sequence[str]) -> list[Replaced]:
    """Linearise one Hugging Face encoder."""
    from linformers.linearize.capture import capturing
    from linformers.linearize.encoders import attention_modules, convert, feature_channels, head_count

    layers = [(join(prefix, name), module) for name, module in attention_modules(encoder)]
    if not any(name in wanted for name, _ in layers):
        return []
    settings: dict[str, Any] = {
        "max_len": plan.max_len,
        "method": plan.method,
        "sharing": plan.sharing,
        "local_window": plan.local_window,
        "open_slots": plan.open_slots,
    }
    if plan.method == "content":
        settings["assigned_by"] = "input"
    slots: list[int] = []
    fitted: list[dict[str, Tensor] | None] = []
    replaced: list[Replaced] = []
    with capturing(encoder, model) as samples_of:
        for name, module in layers:
            if name not in wanted:
                slots.append(0)
                fitted.append(None)
                continue
            samples = samples_of(module, plan.calibration) if plan.fit_steps or plan.k == "spectrum" else []
            k = plan.slots(wanted.index(name), samples)
            sizes = head_count(encoder.config), feature_channels(encoder.config, settings)
            projection = plan.start(plan.max_len, k, *sizes, next(module.parameters()))
            errors = _fit(projection, samples, plan)
            slots.append(k)
            fitted.append(projection.state_dict())
            replaced.append(_replaced(name, k, plan, projection, errors))
    for new, state in zip(convert(encoder, settings | {"slots": slots}), fitted, strict=True):
        if new is not None and state is not None:
            new.load_state_dict(state)
    return replaced


def _convert_site(model: nn.Module, site: modules.Site, plan: Plan, index: int) -> Replaced:
    """Linearise one ``nn.MultiheadAttention``."""
    block_causal = site.role == "causal" and plan.causal == "block"
    if block_causal and (plan.k == "spectrum" or plan.fit_steps):
        raise ValueError(f"{site.name} becomes block-causal: give its k as a number, and no fit_steps")
    samples = modules.capture(model, site, plan.calibration) if plan.fit_steps or plan.k == "spectrum" else []
    k = plan.slots(index, samples)
    sizes, like = (site.module.num_heads, site.module.kdim), site.module.out_proj.weight
    # A causal block always sees its neighbours, and the keys of cross-attention are at other positions than its queries.
    window = plan.local_window if site.role == "self" or (site.role == "causal" and not block_causal) else 0
    plan = plan._replace(local_window=window)
    new = modules.converted(
        site.module,
        max_len=plan.max_len,
        k=k,
        make=lambda positions, slots: plan.start(positions, slots, *sizes, like, block_causal),
        causal=block_causal,
        block_size=plan.block_size,
        content=plan.method == "content",
        local_window=window,
        open_slots=plan.open_slots,
    )
    errors = _fit(new.projection, samples, plan)
    modules.swap(model, site.module, new)
    more = ""
    if block_causal:
        more = f", block-causal with blocks of {new.block_size}"
    elif site.role == "cross":
        more = ", cross-attention"
    return _replaced(site.name, k, plan, new.projection, errors, more, new.block_size if block_causal else 0)


def _fit(projection: Projection, samples: Sequence[Sample], plan: Plan) -> tuple[float, float] | None:
    return fit(projection, samples, steps=plan.fit_steps, local_window=plan.local_window) if plan.fit_steps else None


def _replaced(
    name: str,
    k: int,
    plan: Plan,
    projection: Projection,
    errors: tuple[float, float] | None,
    more: str = "",
    causal_block: int = 0,
) -> Replaced:
    """The entry of one attention in the report.

    Args:
        causal_block: positions of a block of block-causal attention; 0 for others.
    """
    how = plan.method
    near = min(3 * plan.local_window, plan.max_len)  # its own block and both neighbouring ones
    how += f", at most {near} exact neighbours" if near else ""
    how += more
    keys = 0
    if plan.open_slots:
        how += f", {plan.open_slots} opened slots"
        keys = exact_keys(projection, plan.max_len, plan.open_slots, plan.local_window, causal_block)
    before, after = errors or (None, None)
    return Replaced(name, k, how, before, after, keys)
