"""Linformer models for Hugging Face transformers; importing this package lets the Auto classes find them."""

from linformers.extras import needed

with needed("linformers.hf", "hf"):
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForMultipleChoice,
        AutoModelForQuestionAnswering,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

from linformers.hf.cache import LinformerCache
from linformers.hf.classifiers import (
    LinformerForMultipleChoice,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)
from linformers.hf.configuration import LinformerConfig
from linformers.hf.language import LinformerForCausalLM, LinformerForMaskedLM
from linformers.hf.modeling import LinformerModel, LinformerPreTrainedModel
from linformers.hf.seq2seq import LinformerForSeq2SeqLM
from linformers.pretrained.convert import convert_old_files

AutoConfig.register(LinformerConfig.model_type, LinformerConfig)
convert_old_files(LinformerConfig.model_type)
for auto, model in {
    AutoModel: LinformerModel,
    AutoModelForMaskedLM: LinformerForMaskedLM,
    AutoModelForCausalLM: LinformerForCausalLM,
    AutoModelForSequenceClassification: LinformerForSequenceClassification,
    AutoModelForTokenClassification: LinformerForTokenClassification,
    AutoModelForQuestionAnswering: LinformerForQuestionAnswering,
    AutoModelForMultipleChoice: LinformerForMultipleChoice,
    AutoModelForSeq2SeqLM: LinformerForSeq2SeqLM,
}.items():
    auto.register(LinformerConfig, model)

__all__ = [
    "LinformerCache",
    "LinformerConfig",
    "LinformerForCausalLM",
    "LinformerForMaskedLM",
    "LinformerForMultipleChoice",
    "LinformerForQuestionAnswering",
    "LinformerForSeq2SeqLM",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
]
