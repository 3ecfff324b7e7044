"""Hugging Face encoders whose self-attention attends to slots: their configurations, their classes, and the conversion of a stock encoder.

Axes: b batch, h heads, n positions, k slots, d channels.

Every class has a counterpart, ``BertModel`` has ``LinearizedBertModel``, with a configuration of its own ``model_type``; the Auto classes
find both. What differs is one registered attention function, and a projection in every attention module that uses it.
"""

import copy
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformers.checks import one_of
from linformers.extras import needed

with needed("linformers.linearize.encoders", "hf"):
    import transformers

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.bert import modeling_bert
from transformers.models.distilbert import modeling_distilbert
from transformers.models.electra import modeling_electra
from transformers.models.modernbert import modeling_modernbert
from transformers.models.roberta import modeling_roberta
from transformers.models.vit import modeling_vit

from linformers.linearize.core import attend_near, blank_heads
from linformers.linearize.early import WITH_INPUT, assigned_by_keys
from linformers.linearize.projection import check_opening, make_start
from linformers.nn.core import How, attend_heads
from linformers.nn.memory import Opens
from linformers.ops.linformer import attend, attend_with_weights
from linformers.pretrained.convert import convert_old_files
from linformers.private import attention_name, is_initialized, set_attention_name
from linformers.projections.base import Projection, check_length

IMPLEMENTATION = "linformers"


class Architecture(NamedTuple):
    """The classes of one architecture, and their module in transformers."""

    config: type[PreTrainedConfig]
    attention: type[nn.Module]
    module: ModuleType


ARCHITECTURES = {
    "bert": Architecture(transformers.BertConfig, modeling_bert.BertSelfAttention, modeling_bert),
    "roberta": Architecture(transformers.RobertaConfig, modeling_roberta.RobertaSelfAttention, modeling_roberta),
    "distilbert": Architecture(
        transformers.DistilBertConfig, modeling_distilbert.DistilBertSelfAttention, modeling_distilbert
    ),
    "electra": Architecture(transformers.ElectraConfig, modeling_electra.ElectraSelfAttention, modeling_electra),
    "vit": Architecture(transformers.ViTConfig, modeling_vit.ViTAttention, modeling_vit),
    "modernbert": Architecture(
        transformers.ModernBertConfig, modeling_modernbert.ModernBertAttention, modeling_modernbert
    ),
}

AUTO_CLASSES = {
    "Model": transformers.AutoModel,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForPreTraining": transformers.AutoModelForPreTraining,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
    "ForMultipleChoice": transformers.AutoModelForMultipleChoice,
    "ForNextSentencePrediction": transformers.AutoModelForNextSentencePrediction,
    "ForImageClassification": transformers.AutoModelForImageClassification,
    "ForMaskedImageModeling": transformers.AutoModelForMaskedImageModeling,
}

ATTENTIONS = tuple(architecture.attention for architecture in ARCHITECTURES.values())


SETTINGS = ("max_len", "slots", "method", "sharing", "local_window", "open_slots", "assigned_by")


class LinearizedConfig(PreTrainedConfig):
    """What the configuration of every linearised model adds to that of its original.

    Attributes:
        linformers: ``max_len``; ``slots``, one number for each layer, 0 where its attention was not replaced; ``method``, ``sharing``,
            ``local_window`` and ``open_slots``, which is 0 in files that lack it; with content slots ``assigned_by``, ``"input"``, in files
            that lack it the keys.
    """

    linformers: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        # A stock class takes this name from the file and then has no such attention, or one that refuses to run without a projection.
        return {**super().to_dict(), "attn_implementation": IMPLEMENTATION}


class Linearized:
    """What every linearised model adds to its original."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.linformers is None:
            raise ValueError(
                f"{type(config).__name__} has no `linformers` settings; make the model with linearize(...)"
            )
        if unknown := sorted(set(config.linformers) - set(SETTINGS)):
            raise ValueError(
                f"the model has the setting {unknown[0]!r}, which this version of linformers does not know; install a newer one: "
                "pip install --upgrade linformers"
            )
        if attention_name(config) is None:
            set_attention_name(config, IMPLEMENTATION)
        check_implementation(attention_name(config))
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, config.linformers)  # type: ignore[arg-type]

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Raise a ValueError: another implementation would run full attention with the weights of this model."""
        check_implementation(attn_implementation)

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Projection):
            super()._init_weights(module)  # type: ignore[misc]
        elif not any(map(is_initialized, module.parameters())):
            module.reset_parameters()


def check_implementation(name: object) -> None:
    """Raise a ValueError for any attention but this one."""
    if name != IMPLEMENTATION:
        raise ValueError(
            f"attn_implementation={name!r}, but this model was linearised and runs with {IMPLEMENTATION!r} only; leave it out, "
            "or load the original model"
        )


def install(model: nn.Module, settings: dict[str, Any]) -> list[Projection | None]:
    """Give the attention modules of ``model`` their projections, as the settings say.

    Returns:
        The projection of every layer, or None.
    """
    layers = attention_modules(model)
    made: list[Projection | None] = []
    check_opening(opened(settings), settings["method"])
    if "assigned_by" in settings:
        one_of("assigned_by", settings["assigned_by"], ("input",))
    for (_, module), slots in zip(layers, settings["slots"], strict=True):
        module.projection = None
        if slots:
            parameter = next(module.parameters())
            module.projection = make_start(
                settings["method"],
                settings["max_len"],
                slots,
                heads=head_count(module.config),
                sharing=settings["sharing"],
                channels=feature_channels(module.config, settings),
                device=parameter.device,
                dtype=parameter.dtype,
            )
            module.__class__ = WITH_INPUT.get(type(module), type(module))
        made.append(module.projection)
    return made


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules of the self-attention of a supported encoder, in the order of its layers."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ATTENTIONS)]


def head_count(config: Any) -> int:
    """Attention heads of a layer; every configuration answers to this name, DistilBERT's too."""
    return int(config.num_attention_heads)


def key_channels(config: Any) -> int:
    """Channels of the keys of all heads of a layer together."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // head_count(config)) * head_count(config)


def feature_channels(config: Any, settings: dict[str, Any]) -> int:
    """Channels of what tokens are assigned to content slots by."""
    return key_channels(config) if assigned_by_keys(settings) else int(config.hidden_size)


def opened(settings: dict[str, Any]) -> int:
    """How many slots each query opens; models saved before there was such a setting open none."""
    return int(settings.get("open_slots", 0))


def find_encoders(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """The outermost supported encoders in ``model``: often the model itself, or the model inside a wrapper."""
    found: list[tuple[str, PreTrainedModel]] = []
    for name, module in model.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}." if outer else "") for outer, _ in found)
        if not inside and type(module) in LINEARIZED:
            found.append((name, module))
    return found


def reason_to_leave(module: Any, method: str = "") -> str:
    """Why the attention of one layer is left alone; empty if it is to be replaced."""
    if getattr(module.config, "is_decoder", False):
        return "self-attention of a decoder, causal"
    if getattr(module, "sliding_window", None) is not None:
        return "local attention, linear already"
    if method == "content" and type(module) not in (*WITH_INPUT, *WITH_INPUT.values()):
        return f"content slots need the input of the layer, which {type(module).__qualname__}, a class of its own, may not get"
    return ""


def convert(model: PreTrainedModel, settings: dict[str, Any]) -> list[Projection | None]:
    """Make ``model`` its linearised counterpart, in place: the same modules and weights, and projections.

    Its configuration is replaced, not changed: other models may have been built with the same object.
    """
    old: Any = model.config
    new_class: Any = LINEARIZED[type(model)]
    values = {
        key: value
        for key, value in copy.deepcopy(old.to_dict()).items()
        if key not in ("model_type", "attn_implementation")
    }
    config = new_class.config_class(**values, linformers=settings, attn_implementation=IMPLEMENTATION)
    config.name_or_path = old.name_or_path
    with torch.device("meta"):  # transformers finds out which outputs a class can record when an instance is built
        new_class(copy.deepcopy(config))
    replace_config(model, config)
    model.__class__ = new_class
    return install(model, settings)


def replace_config(model: PreTrainedModel, config: Any) -> None:
    """Give a model and its parts another configuration, instead of changing one that other models may have been built with."""
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            setattr(module, "config", config)  # noqa: B010 - modules declare tensors and modules only


def linformer_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    features: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function of a linearised model; transformers also passes arguments that it does not use.

    Args:
        module: the attention module; its ``projection`` says to how many slots it attends.
        query: ``(b, h, n, d)``.
        key: ``(b, h, n, d)``.
        value: ``(b, h, n, d)``.
        attention_mask: ``(b, n)``, True where a token is real, as :func:`padding_mask` makes it.
        features: ``(b, n, ch)``, the input of the layer, by which tokens are assigned to content slots.

    Returns:
        ``(b, n, h, d)``, and the weights if requested.
    """
    if not isinstance(module.config, LinearizedConfig):
        raise ValueError(
            f"{type(module).__name__} runs with attn_implementation={IMPLEMENTATION!r} but is a stock module without a "
            "projection; load a linearised model with an Auto class after `import linformers.linearize`"
        )
    if attention_mask is not None and attention_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"got an attention mask of shape {tuple(attention_mask.shape)}; linearised attention takes a padding mask "
            f"{(key.shape[0], key.shape[2])}, because a slot mixes all positions"
        )
    query = rescaled(query, scaling)
    need_weights = module.config.output_attentions if output_attentions is None else output_attentions
    projection = module.projection
    if projection is not None:
        check_length(key.shape[2], projection.max_len)
        key, value = blank_heads(key, value, attention_mask)
        settings, how = module.config.linformers or {}, How(dropout, need_weights, projection.k)
        opens = Opens(opened(settings)) if opened(settings) else None
        features = None if assigned_by_keys(settings) else features
        seen: dict[str, Any] = {"keep": attention_mask, "block": settings["local_window"], "opens": opens}
        out, weights = attend_heads(query, key, value, projection, features=features, **seen, how=how)
    else:
        out, weights = exact(query, key, value, attention_mask, dropout, sliding_window, need_weights)
    return out.transpose(1, 2), weights


def exact(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: float, sliding_window: int | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of a layer that was left alone. The weights of local attention are not returned: they would be n x n."""
    if sliding_window is not None:  # transformers passes the first distance that is too large
        return attend_near(q, k, v, sliding_window - 1, keep, dropout), None
    return attend_with_weights(q, k, v, keep, dropout) if need_weights else (attend(q, k, v, keep, dropout), None)


def rescaled(query: Tensor, scaling: float | None) -> Tensor:
    """Queries for another scale of the logits than 1/sqrt(d), which :func:`linformers.ops.linformer.attend` applies itself."""
    return query if scaling is None else query * (scaling * query.shape[-1] ** 0.5)


def padding_mask(*, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """transformers' mask function of a linearised model: returns the mask ``(b, n)`` unchanged, and never builds one of n x n."""
    return attention_mask


AttentionInterface.register(IMPLEMENTATION, linformer_attention)
AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)

LINEARIZED: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _register(model_type: str, architecture: Architecture) -> None:
    """Make the linearised classes of one architecture, name them in this module, and register them with the Auto classes."""
    config_name = f"Linearized{architecture.config.__name__}"
    config = type(
        config_name,
        (LinearizedConfig, architecture.config),
        {"model_type": f"linformers-{model_type}", "__module__": __name__, "__doc__": f"A linearised {model_type}."},
    )
    globals()[config_name] = config
    transformers.AutoConfig.register(config.model_type, config)  # type: ignore[attr-defined]
    convert_old_files(config.model_type)  # type: ignore[attr-defined]
    for name in architecture.module.__all__:
        original = getattr(architecture.module, name)
        prefix, _, kind = name.partition("For")
        kind = f"For{kind}" if kind else "Model" if prefix.endswith("Model") else ""
        if (
            kind not in AUTO_CLASSES
            or not issubclass(original, PreTrainedModel)
            or prefix.endswith(("PreTrainedModel", "LMHeadModel"))
        ):
            continue
        body = {"config_class": config, "__module__": __name__, "__doc__": f"{name} that attends to slots."}
        model = type(f"Linearized{name}", (Linearized, original), body)
        LINEARIZED[original] = globals()[model.__name__] = model
        if (names := get_checkpoint_conversion_mapping(name)) is not None:
            convert_old_files(model.__name__, names)  # a model that was loaded is saved with its old names
        AUTO_CLASSES[kind].register(config, model)


for _model_type, _architecture in ARCHITECTURES.items():
    _register(_model_type, _architecture)
