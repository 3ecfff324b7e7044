"""Attention modules of Hugging Face encoders that know their input: it chooses content slots, and is shortened before the maps to keys and
values where the result is the same.

Axes: b batch, h heads, n positions, k slots, ch channels of the model.

``E (x W) = (E x) W``: two products with n rows become two with k rows. Only plain ``nn.Linear`` maps allow it; with anything around
them (an adapter, a hook), with exact neighbours and with opened slots, the module runs as its original does, and is shortened afterwards.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.electra.modeling_electra import ElectraSelfAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.vit.modeling_vit import ViTAttention

from linformers.nn.core import How, look_up
from linformers.nn.memory import make_memory
from linformers.ops.heads import join_heads
from linformers.projections.base import check_length
from linformers.watch import is_plain


class KnowsItsInput:
    """Mixed in before the class of an attention module: passes its input to the attention function, which otherwise gets keys alone."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, *args, features=hidden_states, **kwargs)  # type: ignore[misc]


class ShortensEarly(KnowsItsInput):
    """The same for a module with separate maps to queries, keys and values.

    Attributes:
        maps: the names of its linear maps to queries, keys and values.
        out: the name of the linear map to its output, or empty if another module has it.
    """

    maps: ClassVar[tuple[str, str, str]] = ("query", "key", "value")
    out: ClassVar[str] = ""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments of the original (and others that transformers passes) and its result: ``(b, n, ch)`` and the weights."""
        maps = [getattr(self, name) for name in self.maps]
        settings = self.config.linformers
        masked = attention_mask is None or attention_mask.shape == hidden_states.shape[:2]
        plain = all(map(is_plain, maps)) and past_key_values is None and masked
        needs_keys = settings["local_window"] or settings.get("open_slots") or assigned_by_keys(settings)
        if self.projection is None or needs_keys or not plain:
            kwargs |= {"output_attentions": output_attentions}
            if past_key_values is not None:
                kwargs |= {"past_key_values": past_key_values}
            return super().forward(hidden_states, attention_mask, **kwargs)
        check_length(hidden_states.shape[1], self.projection.max_len)
        heads = self.config.num_attention_heads
        q = maps[0](hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
        memory = make_memory(
            hidden_states, hidden_states, maps[1], maps[2], self.projection, heads=heads, keep=attention_mask
        )
        dropout = getattr(self, "attention_dropout", None)
        dropout = self.dropout.p if dropout is None else dropout
        need_weights = self.config.output_attentions if output_attentions is None else output_attentions
        how = How(dropout if self.training else 0.0, need_weights, self.projection.k)
        out, weights = look_up(q, memory, None, how)
        out = join_heads(out)
        return getattr(self, self.out)(out) if self.out else out, weights


class EarlyBertSelfAttention(ShortensEarly, BertSelfAttention):  # type: ignore[misc]
    pass


class EarlyRobertaSelfAttention(ShortensEarly, RobertaSelfAttention):  # type: ignore[misc]
    pass


class EarlyElectraSelfAttention(ShortensEarly, ElectraSelfAttention):  # type: ignore[misc]
    pass


class EarlyDistilBertSelfAttention(ShortensEarly, DistilBertSelfAttention):  # type: ignore[misc]
    maps = ("q_lin", "k_lin", "v_lin")
    out = "out_lin"


class EarlyViTAttention(ShortensEarly, ViTAttention):  # type: ignore[misc]
    maps = ("q_proj", "k_proj", "v_proj")
    out = "o_proj"


class ModernBertAttentionWithInput(KnowsItsInput, ModernBertAttention):
    """Not shortened before its maps: the keys are rotated first, and one map makes all three."""


def assigned_by_keys(settings: dict[str, Any]) -> bool:
    """Whether a saved model has content slots from before their tokens were assigned by the input of the layer."""
    return settings["method"] == "content" and "assigned_by" not in settings


WITH_INPUT: dict[type[nn.Module], type[nn.Module]] = {
    kind.__bases__[1]: kind
    for kind in (
        EarlyBertSelfAttention,
        EarlyRobertaSelfAttention,
        EarlyElectraSelfAttention,
        EarlyDistilBertSelfAttention,
        EarlyViTAttention,
        ModernBertAttentionWithInput,
    )
}
