"""``LinformerForSeq2SeqLM``: an encoder, and a causal decoder with cross-attention to the source.

Axes: b batch, s source positions, t target positions, v tokens of the vocabulary, ch channels.
Masks: ``attention_mask`` and ``decoder_attention_mask`` are 1, or True, where a token is real.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from linformers.hf.cache import LinformerCache
from linformers.hf.configuration import LinformerConfig
from linformers.hf.language import LanguageModel
from linformers.hf.loss import check_tensors, token_loss
from linformers.hf.modeling import LinformerModel
from linformers.labels import IGNORED
from linformers.ops.span import refuse
from linformers.private import resize_embeddings


class LinformerForSeq2SeqLM(LanguageModel, GenerationMixin):
    """Logits of the next target token, from the source and the target so far; with ``generate``.

    With ``tie_word_embeddings`` the encoder, the decoder and the output share one matrix.
    """

    _tied_weights_keys = {  # noqa: RUF012
        "decoder.body.token_emb.weight": "encoder.body.token_emb.weight",
        "lm_head.weight": "encoder.body.token_emb.weight",
    }

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config.encoder_decoder())
        self.encoder = LinformerModel(self.config.encoder_side())
        source = self.config.max_position_embeddings, self.config.hidden_size
        self.decoder = LinformerModel(self.config.decoder_side(), *source)
        self.lm_head = self.new_head()
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of the source tokens."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Use another embedding of the source tokens; for the target as well if they are tied."""
        self.encoder.set_input_embeddings(value)
        if self.config.tie_word_embeddings:
            self.decoder.set_input_embeddings(value)

    def resample_(self, max_len: int | None = None, k: int | None = None, noise: float = 0.01) -> None:
        """Raise a ValueError: there are two lengths, and :func:`linformers.resample` takes one."""
        raise ValueError("resample changes one length, but a sequence-to-sequence model has two; build a new one")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: LinformerCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits ``(b, t, v)``; with ``labels`` ``(b, t)``, the target or -100, also the loss.

        Args:
            input_ids: the source, ``(b, s)``; or ``inputs_embeds`` ``(b, s, ch)``, or ``encoder_outputs``.
            attention_mask: ``(b, s)``, 1 where the source is real.
            decoder_input_ids: the input of the decoder, ``(b, t)``; None makes it from the labels.
            decoder_attention_mask: ``(b, t)``, 1 where the target is real.
            encoder_outputs: the output of the encoder for the source, if it has been computed.
            past_key_values: continue from this cache.
        """
        show = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "return_dict": True,
        }
        source: Any = encoder_outputs
        if source is None:
            source = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **show)
        elif isinstance(source, tuple):
            source = BaseModelOutput(*source)
        check_tensors(labels=labels)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            refuse("labels without decoder_input_ids, which are the labels shifted by one position,")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=source.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=False if labels is not None and use_cache is None else use_cache,
            **show,
        )
        logits = self.logits(outputs.last_hidden_state)
        return self._answer(
            Seq2SeqLMOutput,
            return_dict,
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=source.last_hidden_state,
            encoder_hidden_states=source.hidden_states,
            encoder_attentions=source.attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The input of the decoder for ``labels`` ``(b, t)``: the start token, then all labels but the last."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(
                f"labels need decoder_start_token_id and pad_token_id, got {start} and {pad}; set them in config"
            )
        moved = labels.new_full(labels.shape, start)
        moved[:, 1:] = labels[:, :-1]
        return moved.masked_fill(moved == IGNORED, pad)

    def _resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        if not self.config.tie_word_embeddings:
            resize_embeddings(self.decoder, new_num_tokens, pad_to_multiple_of, mean_resizing)
        return super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
