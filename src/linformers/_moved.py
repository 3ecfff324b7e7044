"""Module paths of earlier versions: still importable, with a warning that names the new place.

A pickled model names the module of every class, so these paths must resolve for as long as such files are read.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

# The old module, and the new ones that have its public names. The first is the one to use instead. `linformers.resample`
# is not listed: importing it as a module would hide the function of that name.
MOVED: dict[str, tuple[str, ...]] = {
    "attention": ("nn.multihead", "ops.masks"),
    "blocks": ("ops.blocks", "ops.masks"),
    "causal": ("nn.state", "nn.memory", "ops.blocks"),
    "convert": ("models.convert",),
    "functional": ("ops.linformer", "ops.masks", "ops.segments", "ops.heads", "ops.cpu", "projections.dense"),
    "generation": ("models.generation",),
    "layer": ("nn.layer", "nn.state"),
    "layers": ("nn.attention", "nn.feedforward", "nn.mixing", "nn.positions", "nn.memory"),
    "long": ("ops.cpu", "nn.core"),
    "reversible": ("models.reversible",),
    "seq2seq": ("models.encdec",),
    "shorten": ("nn.maps", "nn.memory", "ops.heads"),
    "spectrum": ("ops.spectrum",),
    "stack": ("models.stack", "models.options", "ops.masks", "checks"),
    "streaming": ("models.streaming",),
    "visualize": ("models.visualize",),
    "training.memory": ("training.allocator",),
    "windows": ("models.windows",),
}
QUIET = ("streaming",)  # the documented path is `linformers.streaming`


class Moved(MetaPathFinder, Loader):
    """Finds the old paths, after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return spec_from_loader(fullname, self) if package == "linformers" and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        if name not in QUIET:
            warnings.warn(
                f"{module.__name__} has moved; import from linformers, or from linformers.{MOVED[name][0]}",
                DeprecationWarning,
                stacklevel=2,
            )
        module.__doc__ = f"Moved to {', '.join(f'linformers.{place}' for place in MOVED[name])}."
        for place in reversed(MOVED[name]):
            found = vars(importlib.import_module(f"linformers.{place}"))
            vars(module).update({key: value for key, value in found.items() if not key.startswith("_")})


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
