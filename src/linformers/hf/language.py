"""The language models: masked and causal.

Axes: b batch, n positions, v tokens of the vocabulary, ch channels.
Masks: ``attention_mask`` is 1, or True, where a token is real.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from linformers.hf.cache import LinformerCache
from linformers.hf.configuration import LinformerConfig
from linformers.hf.loss import check_tensors, token_loss
from linformers.hf.modeling import LinformerModel, LinformerPreTrainedModel
from linformers.labels import IGNORED
from linformers.ops.span import refuse


class LanguageModel(LinformerPreTrainedModel):
    """Shared by the language models: features to logits."""

    lm_head: nn.Linear

    def new_head(self) -> nn.Linear:
        """A map to the vocabulary; without a bias if it shares the embedding's matrix."""
        return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=not self.config.tie_word_embeddings)

    def logits(self, x: Tensor) -> Tensor:
        """Features ``(..., ch)`` to logits ``(..., v)``."""
        if self.config.tie_word_embeddings:  # as in LinformerLM: so that the initial logits have unit variance
            x = x * (self.config.hidden_size**-0.5 / self.config.embedding_scale)
        return self.lm_head(x)


class LinformerForMaskedLM(LanguageModel):
    """Logits of every token, from the tokens on both sides."""

    _tied_weights_keys = {"lm_head.weight": "model.body.token_emb.weight"}  # noqa: RUF012

    def __init__(self, config: LinformerConfig) -> None:
        if config.is_decoder:
            raise ValueError("this configuration has is_decoder=True, but a masked language model is bidirectional")
        super().__init__(config)
        self.model = LinformerModel(config)
        self.lm_head = self.new_head()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        asked_only: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits ``(b, n, v)``; with ``labels`` ``(b, n)``, -100 where there is none, also the loss.

        Args:
            asked_only: compute the logits of positions with a label only, ``(labels, v)``: the same loss, at a fraction of the cost of the
                output layer.
        """
        check_tensors(labels=labels)
        outputs = self._features(
            *(input_ids, attention_mask, token_type_ids, inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        x = outputs.last_hidden_state
        if asked_only:
            if labels is None:
                raise ValueError("asked_only=True needs labels")
            asked = labels != IGNORED
            x, labels = x[asked], labels[asked]
        logits = self.logits(x)
        return self._answer(
            MaskedLMOutput,
            return_dict,
            outputs,
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
        )


class LinformerForCausalLM(LanguageModel, GenerationMixin):
    """Logits of the next token, from those before it; with ``generate``."""

    _tied_weights_keys = {"lm_head.weight": "model.body.token_emb.weight"}  # noqa: RUF012

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config.causal())
        self.model = LinformerModel(self.config)
        self.lm_head = self.new_head()
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: LinformerCache | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        next_tokens: Tensor | None = None,
    ) -> Any:
        """Logits ``(b, n, v)``; with ``labels`` ``(b, n)``, equal to the input or -100, also the loss.

        Args:
            logits_to_keep: compute the logits of this many last positions only, or of the positions in a tensor; 0 for all.
            next_tokens: instead of ``labels``, what follows each position, ``(b, n)``, -100 where there is nothing: for sequences that are split over
                processes, where the next token may be in another one.
        """
        check_tensors(labels=labels, next_tokens=next_tokens)
        if labels is not None:
            refuse("labels of next tokens, which are shifted by one position,", "give next_tokens instead")
        has_labels = labels is not None or next_tokens is not None
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            past_key_values=past_key_values,
            use_cache=False if has_labels and use_cache is None else use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            if has_labels:
                raise ValueError("labels need the logits of all positions; leave logits_to_keep out")
            x = x[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else x[:, -logits_to_keep:]
        logits = self.logits(x)
        loss = None
        if next_tokens is not None:
            loss = token_loss(logits, next_tokens, num_items_in_batch)
        elif labels is not None:  # the last position has no next token to be compared with
            loss = token_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return self._answer(
            CausalLMOutputWithPast,
            return_dict,
            outputs,
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
        )
