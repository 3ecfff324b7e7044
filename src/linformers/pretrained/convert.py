"""Hugging Face files of the earlier layout, whose projections are stacked: transformers converts them while it loads.

``from_pretrained`` assigns parameters without ``load_state_dict``, so that the conversion in ``Projection._load_from_state_dict`` does not run.
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
    """:func:`linformers.projections.layout.to_rows` for tensors of projections only: other modules, such as ViT's patches, may have the same name."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        """Convert one tensor; transformers also passes the ``model``, and the tensor's ``full_layer_name`` in it."""
        (found,) = input_dict.values()
        tensor = found[0] if isinstance(found, list) else found
        path, _, name = kwargs["full_layer_name"].rpartition(".")
        module = kwargs["model"].get_submodule(path)
        ours = isinstance(module, Projection) and name == module.stored
        return {target_patterns[0]: [to_rows(tensor) if ours else tensor]}

    @property
    def reverse_op(self) -> ConversionOps:
        """The same operation: a model from an old file is saved in rows."""
        return self


def convert_old_files(name: str, others: Sequence[Any] = ()) -> None:
    """Let ``from_pretrained`` load files of the earlier layout.

    Args:
        name: a ``model_type``, or the name of a class, which has precedence.
        others: transformers' own conversions that the models need as well.
    """
    names = [f"projection.{kind.stored}" for kind in (Dense, Convolution)]
    ours = [WeightConverter(name, name, operations=[ToRows()]) for name in names]
    register_checkpoint_conversion_mapping(name, [*others, *ours], overwrite=True)
