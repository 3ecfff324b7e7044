"""Models: stacks, text models and encoder-decoders; generation and inference over long inputs."""

from linformers.models.classifier import LinformerClassifier, pool
from linformers.models.encdec import LinformerEncDec
from linformers.models.language import LinformerLM
from linformers.models.stack import Linformer
from linformers.models.tokens import TokenStack

__all__ = ["Linformer", "LinformerClassifier", "LinformerEncDec", "LinformerLM", "TokenStack", "pool"]
