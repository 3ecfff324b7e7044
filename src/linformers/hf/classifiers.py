"""Models that classify: sequences, tokens, the span that answers a question, and one of several choices.

Axes: b batch, n positions, c classes, o choices, ch channels.
Masks: ``attention_mask`` is 1, or True, where a token is real.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from linformers.hf.configuration import LinformerConfig
from linformers.hf.loss import check_place, check_tensors, token_loss
from linformers.hf.modeling import LinformerModel, LinformerPreTrainedModel, as_keep
from linformers.labels import IGNORED
from linformers.models.classifier import pool
from linformers.ops.span import Span, refuse


class Classifier(LinformerPreTrainedModel):
    """Shared by the classifiers: dropout after the features, and pooling."""

    weigh: nn.Linear | None

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.model = LinformerModel(config)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)

    def pooled(self, x: Tensor, attention_mask: Tensor | None, span: Span) -> Tensor:
        """One vector for each sequence: ``(b, n, ch)`` to ``(b, ch)``."""
        keep = as_keep(attention_mask)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if keep is None else keep
        x = pool(x, keep, first=self.config.pooling == "first", weigh=self.weigh, span=span)
        if span.whole or not (self.training and self.dropout.p):
            return self.dropout(x)
        return x * span.of_first(self.dropout(torch.ones_like(x)))  # all processes of a sequence have this vector

    def new_weigh(self) -> nn.Linear | None:
        """The map that weights tokens if ``pooling="attention"``, else None."""
        return nn.Linear(self.config.hidden_size, 1) if self.config.pooling == "attention" else None


class LinformerForSequenceClassification(Classifier):
    """Logits of the classes of a sequence, or predicted numbers (``problem_type="regression"``)."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.weigh = self.new_weigh()
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits ``(b, c)``; with ``labels``, ``(b,)`` for one class or number, ``(b, c)`` for several, also the loss."""
        span = self.model.enter(input_ids, attention_mask, token_type_ids, inputs_embeds)
        outputs = self._features(
            *(input_ids, attention_mask, token_type_ids, inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            span=span,
        )
        logits = span.once(self.classifier(self.pooled(outputs.last_hidden_state, attention_mask, span)))
        return self._answer(
            SequenceClassifierOutput,
            return_dict,
            outputs,
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
        )

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        check_place(labels, logits)
        labels = labels.to(logits.device)
        if self.config.problem_type is None:  # inferred from the first labels, as transformers does
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type == "single_label_classification":
            return token_loss(logits, labels, labels_in(labels) if count is None else count)
        if labels.numel() != logits.numel():
            raise ValueError(
                f"problem_type={self.config.problem_type!r} with {self.config.num_labels} labels needs labels of shape "
                f"{tuple(logits.shape)}, got {tuple(labels.shape)}"
            )
        loss = F.mse_loss if self.config.problem_type == "regression" else F.binary_cross_entropy_with_logits
        total = loss(logits.float(), labels.view_as(logits).float(), reduction="sum")
        count = labels.numel() if count is None else count
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


class LinformerForTokenClassification(Classifier):
    """Logits of the classes of every token."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits ``(b, n, c)``; with ``labels`` ``(b, n)``, -100 where there is none, also the loss."""
        outputs = self._features(
            *(input_ids, attention_mask, token_type_ids, inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        return self._answer(
            TokenClassifierOutput,
            return_dict,
            outputs,
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
        )


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """Logits of the first and of the last token of the answer in a text."""

    accepts_loss_kwargs = False  # the Trainer counts labels, and this model has positions instead

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.model = LinformerModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits of the first and the last token of the answer, ``(b, n)`` each; with their positions ``(b,)`` also the loss."""
        outputs = self._features(
            *(input_ids, attention_mask, token_type_ids, inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        first, last = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            check_tensors(start_positions=start_positions, end_positions=end_positions)
            refuse("the loss of positions of an answer, a softmax over all positions,")
            # An answer that was cut off has a position past the end; it is not scored.
            losses = [
                token_loss(logits, places.flatten().masked_fill(places.flatten() >= logits.shape[1], IGNORED))
                for logits, places in ((first, start_positions), (last, end_positions))
            ]
            loss = (losses[0] + losses[1]) / 2
        return self._answer(
            QuestionAnsweringModelOutput,
            return_dict,
            outputs,
            loss=loss,
            start_logits=first.contiguous(),
            end_logits=last.contiguous(),
        )


class LinformerForMultipleChoice(Classifier):
    """Logits of several choices, each a text; one of them is right."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.weigh = self.new_weigh()
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Texts ``(b, o, n)`` to logits ``(b, o)``; with ``labels`` ``(b,)`` also the loss."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() < 3:
            raise ValueError(
                f"expected input_ids of shape (batch, choices, length), got {None if given is None else tuple(given.shape)}"
            )
        choices = given.shape[1]
        flat = [
            None if x is None else x.flatten(0, 1) for x in (input_ids, attention_mask, token_type_ids, inputs_embeds)
        ]
        span = self.model.enter(*flat)
        shown = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        outputs = self._features(*flat, **shown, span=span)
        logits = span.once(self.classifier(self.pooled(outputs.last_hidden_state, flat[1], span)).view(-1, choices))
        if labels is not None and num_items_in_batch is None:
            num_items_in_batch = labels_in(labels)
        return self._answer(
            MultipleChoiceModelOutput,
            return_dict,
            outputs,
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
        )


def labels_in(labels: Tensor) -> Tensor:
    """How many labels there are, at least 1. All processes of a sequence have the same ones: they are not added up."""
    return (labels != IGNORED).sum().clamp(min=1)
