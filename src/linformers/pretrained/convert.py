"""Hugging Face files of 0.1.0, whose projections are stacked: transformers converts them while it loads.

``from_pretrained`` assigns parameters past ``load_state_dict``, so that a module's own way of reading an old file is not asked.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from linformers.projections.base import Projection
from linformers.projections.convolution import Convolution
from linformers.projections.dense import Dense
from linformers.projections.layout import to_rows


class ToRows(ConversionOps):
    """:func:`linformers.projections.layout.to_rows` for what belongs to a projection; other modules may have the same name (ViT's patches do)."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        """Convert one tensor; transformers also says for which ``model``, and its ``full_layer_name`` there."""
        (found,) = input_dict.values()
        tensor = found[0] if isinstance(found, list) else found
        path, _, name = kwargs["full_layer_name"].rpartition(".")
        module = kwargs["model"].get_submodule(path)
        ours = isinstance(module, Projection) and name == module.stored
        return {target_patterns[0]: [to_rows(tensor) if ours else tensor]}

    @property
    def reverse_op(self) -> ConversionOps:
        """Itself: a model that came from an old file is saved in rows."""
        return self


def convert_old_files(name: str, others: Sequence[Any] = ()) -> None:
    """Let ``from_pretrained`` take files of 0.1.0.

    Args:
        name: a ``model_type``, or the name of a class, which comes first.
        others: conversions of transformers' own that the models need as well.
    """
    names = [f"projection.{kind.stored}" for kind in (Dense, Convolution)]
    ours = [WeightConverter(name, name, operations=[ToRows()]) for name in names]
    register_checkpoint_conversion_mapping(name, [*others, *ours], overwrite=True)
