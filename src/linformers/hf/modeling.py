"""``LinformerModel``, and the base class of all models: transformers' interface around the modules of this package.

Axes: b batch, h heads, n positions, k slots, v tokens of the vocabulary, ch channels.
Masks: ``attention_mask`` is 1, or True, where a token is real; inside it becomes ``keep``.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import logging
from transformers.utils.generic import ModelOutput

from linformers.hf.cache import LinformerCache
from linformers.hf.configuration import LinformerConfig
from linformers.hf.loading import check_loaded, checked_files
from linformers.models.tokens import TokenStack
from linformers.nn.attention import Attention
from linformers.nn.layer import Layer, Trace
from linformers.nn.mismatch import explained
from linformers.ops.masks import blank, check_mask, readable
from linformers.ops.span import Span, enter
from linformers.private import is_initialized
from linformers.projections.base import Projection

logger = logging.get_logger(__name__)


class LinformerLayer(GradientCheckpointingLayer, Layer):
    """A layer that supports transformers' gradient checkpointing."""


class LinformerPreTrainedModel(PreTrainedModel):
    """Saving, loading and initialising, for all models."""

    config: LinformerConfig
    config_class = LinformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Linformer"]  # noqa: RUF012
    accepts_loss_kwargs = True  # the Trainer passes the number of labels of accumulated batches to the loss

    def __init__(self, config: LinformerConfig) -> None:
        config.check()
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model, and raise an error if its weights do not match its configuration; the arguments are transformers'.

        Raises:
            ValueError: if a file of the weights is damaged, or an index names one outside of the directory.
            RuntimeError: if weights have other shapes than the configuration says, or belong to other layers or projections.
        """
        wants_info, lenient = kwargs.pop("output_loading_info", False), kwargs.pop("ignore_mismatched_sizes", False)
        load: Any = super().from_pretrained
        kwargs.setdefault("use_safetensors", True)  # all files of this package are; a pickle is not even looked for
        with checked_files(pretrained_model_name_or_path, kwargs.get("subfolder")):
            model, info = load(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        if pretrained_model_name_or_path is not None and not lenient:
            check_loaded(str(pretrained_model_name_or_path), info, model)
        return (model, info) if wants_info else model

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep no activations inside the layers; the arguments are transformers'.

        Never re-entrant: the memory that a decoder's layers look up is part of the graph, and its gradient would be lost.
        """
        kwargs = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        super().gradient_checkpointing_enable(kwargs, every_n_layers, offload)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        # transformers leaves loaded tensors alone in calls of torch.nn.init only; a projection also initialises itself by other calls.
        if isinstance(module, Projection):
            if not any(map(is_initialized, module.state_dict(keep_vars=True).values())):
                module.reset_parameters()
        elif std is not None and isinstance(module, nn.Linear | nn.Embedding):
            initialization.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=self.config.embedding_scale)
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.LayerNorm):
            module.reset_parameters()

    def _features(
        self,
        *inputs: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        span: Span | None = None,
    ) -> Any:
        """The output of the model inside, without a cache.

        Args:
            inputs: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``inputs_embeds``.
            span: what ``enter`` returned for them, if it was called.
        """
        shown: dict[str, Any] = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        return self.model(*inputs, use_cache=False, **shown, return_dict=True, span=span)

    def _answer(self, kind: type[ModelOutput], return_dict: bool | None, features: Any = None, **values: Any) -> Any:
        """An output of this kind, with the states and weights of ``features``; a tuple with ``return_dict=False``."""
        if features is not None:
            values |= {"hidden_states": features.hidden_states, "attentions": features.attentions}
        output = kind(**values)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class LinformerModel(LinformerPreTrainedModel):
    """Tokens to features: an encoder, or with ``is_decoder`` in its configuration a causal stack.

    Args:
        config: sizes and options.
        context_size: add cross-attention to a context of at most this length.
        context_channels: channels of that context, which may have any length without ``context_size``; None means ``hidden_size``.
    """

    def __init__(
        self, config: LinformerConfig, context_size: int | None = None, context_channels: int | None = None
    ) -> None:
        if config.is_encoder_decoder:
            raise ValueError(
                "this configuration has is_encoder_decoder=True; build LinformerForSeq2SeqLM, whose .encoder is a LinformerModel"
            )
        super().__init__(config)
        options = config.shared()
        if not config.is_decoder:
            options["block_size"] = options["open_reach"] = None
        has_context = context_size is not None or context_channels is not None
        if not has_context:
            options["cross_attention"] = "same"
        self.body = TokenStack(
            config.vocab_size,
            config.max_position_embeddings,
            config.hidden_size,
            config.slots,
            positions=config.position_embedding_type,
            embedding_scale=config.embedding_scale,
            dropout_tokens=config.hidden_dropout_prob,
            dim_ff=config.intermediate_size,
            dim_d=config.head_dim,
            nhead=config.num_attention_heads,
            depth=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            qkv_bias=config.attention_bias,
            parameter_sharing=config.sharing,
            causal=config.is_decoder,
            activation=config.hidden_act,
            norm_eps=config.layer_norm_eps,
            dropout=config.attention_probs_dropout_prob,
            dropout_ff=config.hidden_dropout_prob,
            context_size=context_size,
            context_channels=context_channels,
            context_k=config.cross_proj_k if has_context else None,
            **options,
        )
        for layer in self.body.linformer.layers:
            layer.__class__ = LinformerLayer  # the same layer, with gradient checkpointing by transformers
        self.token_type_emb = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.post_init()

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Change ``max_position_embeddings`` or ``proj_k`` in place; see :func:`linformers.resample`."""
        self.body.resample_(max_len, k, noise)
        if self.body.input_size is not None:
            self.config.max_position_embeddings = self.body.input_size
        found = [part for part in self.body.linformer.layers.modules() if isinstance(part, Attention)]
        if found and self.config.attention == "linformer":
            slots = [attention.k for attention in found]
            self.config.proj_k = slots if len(set(slots)) > 1 else slots[0]
            self.config.block_size = found[0].block if self.config.is_decoder else self.config.block_size

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of the tokens."""
        return self.body.token_emb

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Use another embedding of the tokens."""
        if not isinstance(value, nn.Embedding):
            raise TypeError(f"expected an nn.Embedding, got {type(value).__name__}")
        self.body.token_emb = value

    @explained(
        "inputs_embeds",
        "encoder_hidden_states",
        ids=("input_ids", "token_type_ids"),
        masks=("attention_mask", "encoder_attention_mask"),
    )
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: LinformerCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        span: Span | None = None,
    ) -> Any:
        """Features of tokens.

        Args:
            input_ids: ``(b, n)``; or else ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 where a token is real; with a cache also for all positions that it has read.
            token_type_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, ch)``.
            encoder_hidden_states: ``(b, s, ch)``, the context of a model that has one.
            encoder_attention_mask: ``(b, s)``.
            past_key_values: continue from this cache.
            use_cache: return a cache to continue from.
            output_attentions: return the weights, ``(b, h, n, k)``; with causal or windowed attention also those of the exact
                neighbours.
            output_hidden_states: return the embeddings and the output of each layer.
            return_dict: False for a tuple.
            span: what :meth:`enter` returned for this input, if it was called.
        """
        keep, cache = as_keep(attention_mask), self._cache(past_key_values, use_cache)
        goes_on = cache is not None and cache.state is not None
        if span is None:
            span = self.enter(input_ids, None if goes_on else attention_mask, token_type_ids, inputs_embeds)
        x = self._embed(input_ids, token_type_ids, inputs_embeds)
        trace = Trace(
            need_weights=self.config.output_attentions if output_attentions is None else output_attentions,
            need_hidden=bool(
                self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
            ),
        )
        if cache is not None and goes_on:
            x = self._go_on(x, keep, cache, trace)
        else:
            stack, memory = self.body.linformer, None
            if encoder_hidden_states is not None:
                memory = stack.memory(encoder_hidden_states, as_keep(encoder_attention_mask))
            if cache is not None:
                cache.start(stack.new_state(len(x), x))
                cache.positions = x.shape[1]
            if self.config.is_decoder:  # the output of a causal stack at padding depends on the rest of the batch
                trace.keep = keep
            x = self.body.run(
                x, keep, memory=memory, state=None if cache is None else cache.state, trace=trace, span=span
            )
            x = blank(x, trace.keep)
        weights, cross_weights = (
            tuple(w for w in found if w is not None) or None for found in (trace.weights, trace.cross_weights)
        )
        return self._answer(
            BaseModelOutputWithPastAndCrossAttentions,
            return_dict,
            last_hidden_state=x,
            past_key_values=cache,
            # The last one is the output of the model, as everywhere in transformers.
            hidden_states=(*trace.hidden[:-1], x) if trace.need_hidden else None,
            attentions=weights,
            cross_attentions=cross_weights,
        )

    @explained("inputs_embeds", ids=("input_ids", "token_type_ids"), masks=("attention_mask",))
    def enter(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Span:
        """Check an input, and return the part of its sequence that this process has; see :mod:`linformers.parallel`."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError(
                f"give exactly one of input_ids and inputs_embeds; got {'neither' if given is None else 'both'}"
            )
        keep = as_keep(attention_mask)
        return enter(self, given, keep, partial(self._check, input_ids, inputs_embeds, keep, token_type_ids))

    def _check(self, ids: Tensor | None, embedded: Tensor | None, keep: Tensor | None, types: Tensor | None) -> None:
        if ids is not None:
            self.body.check(ids, keep)
        elif embedded is not None:
            check_mask(keep, tuple(embedded.shape[:2]))
        # Many tokenisers return zeros by default, which mean nothing; other values are meant to have an effect.
        if self.token_type_emb is None and types is not None and readable(types) and types.any():
            raise ValueError(
                f"got token_type_ids up to {int(types.max())}, but the model was built with type_vocab_size=0"
            )

    def _embed(self, ids: Tensor | None, types: Tensor | None, embedded: Tensor | None) -> Tensor:
        x: Any = embedded if ids is None else self.body.token_emb(ids.long())
        if self.token_type_emb is None:
            return x
        types = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device) if types is None else types
        return x + self.token_type_emb(types)

    def _cache(self, given: LinformerCache | None, use_cache: bool | None) -> LinformerCache | None:
        if given is not None and not isinstance(given, LinformerCache):
            raise TypeError(f"past_key_values must be a LinformerCache or None, got {type(given).__name__}")
        if use_cache and self.training and self.is_gradient_checkpointing:
            logger.warning_once("use_cache=True cannot be combined with gradient checkpointing; no cache is returned.")
            return None
        if given is not None or not self.config.is_decoder:
            return given
        # In training, an unused state would cost time and memory.
        wanted = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        return LinformerCache() if wanted else None

    def _go_on(self, x: Tensor, keep: Tensor | None, cache: LinformerCache, trace: Trace) -> Tensor:
        """Continue from a cache: read the tokens ``(b, n, ch)`` one after the other."""
        n, state = x.shape[1], cache.state
        if state is None:
            raise ValueError("this cache is empty")
        if keep is not None:
            keep = keep[:, -n:]
            keep = None if readable(keep) and keep.all() else keep
        steps = [Trace(trace.need_weights, trace.need_hidden) for _ in range(n)]
        outputs = [
            self.body.run_step(x[:, i], state, None if keep is None else keep[:, i], step)
            for i, step in enumerate(steps)
        ]
        cache.positions += n
        trace.hidden = [
            parts[0] if n == 1 else torch.cat(parts, 1) for parts in zip(*(step.hidden for step in steps), strict=True)
        ]
        trace.weights = [join(parts) for parts in zip(*(step.weights for step in steps), strict=True)]
        trace.cross_weights = [join(parts) for parts in zip(*(step.cross_weights for step in steps), strict=True)]
        return torch.stack(outputs, 1)


def as_keep(mask: Tensor | None) -> Tensor | None:
    """transformers' ``attention_mask`` to a bool mask, ``(b, n)``."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be (batch, length), 1 where a token is real, got {tuple(mask.shape)}; a mask for each pair "
            "of positions has no meaning here, because a slot mixes all positions"
        )
    return mask.bool()


def join(weights: tuple[Tensor | None, ...]) -> Tensor | None:
    """Concatenate the weights of steps ``(b, h, 1, k)``: ``(b, h, n, k)``, zero where a step saw fewer keys."""
    found = [w for w in weights if w is not None]
    if len(found) < 2:  # unchanged: a copy would be outside the graph
        return found[0] if found else None
    width = max(w.shape[-1] for w in found)
    return torch.cat([F.pad(w, (0, width - w.shape[-1])) for w in found], 2)
