"""Optional packages: which extra has them, and the command that installs it. Imports only the standard library."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

HF = ("transformers", "accelerate", "tokenizers")
# The modules of each extra in pyproject.toml. A module in several extras counts for the first one here.
EXTRAS = {
    "hf": HF,
    "keras": ("keras",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "cli": ("cyclopts", "rich", "matplotlib", "jinja2", "yaml"),
    "train": (*HF, "datasets", "tensorboard", "rich", "sklearn", "jinja2"),
    "bench": ("linformer", "linformer_pytorch", "local_attention", "nystrom_attention", "performer_pytorch"),
}


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed; the text says how to install it.

    Args:
        text: the message.
        name: the missing module.
        extra: the extra of this package that contains it, if any.
    """

    def __init__(self, text: str, *, name: str, extra: str | None = None) -> None:
        super().__init__(text, name=name)
        self.extra = extra


@contextmanager
def needed(what: str, extra: str | None = None) -> Iterator[None]:
    """Explain a failed import of an optional package inside the block.

    Args:
        what: what needs it; the outermost of several blocks is named.
        extra: the extra to install for it; None takes the extra of a nested block, or of the missing module.

    Raises:
        MissingPackageError: in place of a ModuleNotFoundError for a module of any extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        found = error.extra if isinstance(error, MissingPackageError) else extra_of(error.name)
        if found is None:
            raise
        raise explained(what, extra or found, str(error.name).partition(".")[0]) from error


def require(what: str, extra: str, *modules: str) -> None:
    """Raise a MissingPackageError if some of the modules, which belong to ``extra``, are not installed; none is imported."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise explained(what, extra, *missing)


def explained(what: str, extra: str, *modules: str) -> MissingPackageError:
    """The error that says which modules are missing, and how to install them."""
    text = f"{what} needs {' and '.join(modules)}: {install(extra)}"
    return MissingPackageError(text, name=modules[0], extra=extra)


def extra_of(module: str | None) -> str | None:
    """The extra that contains a module, or None."""
    package = (module or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if package in modules), None)


def install(extra: str) -> str:
    """The command that installs an extra, from where this package was installed: a checkout, a directory, a file or an index."""
    root = Path(__file__).parents[2]
    if (root / "src" / "linformers" / "extras.py").is_file() and (root / "pyproject.toml").is_file():
        return pip(f"{root}[{extra}]", editable=True)
    try:
        noted = metadata.distribution("linformers").read_text("direct_url.json")  # None if it came from an index
    except metadata.PackageNotFoundError:
        noted = None
    return pip(requirement(extra, noted))


def requirement(extra: str, direct_url: str | None) -> str:
    """The requirement for pip, from the origin that pip recorded for this package (``direct_url.json`` of PEP 610)."""
    plain = f"linformers[{extra}]"
    try:
        noted = json.loads(direct_url or "")
        url = str(noted["url"])
    except (ValueError, KeyError, TypeError):
        return plain
    if urlsplit(url).scheme == "file":
        path = Path(url2pathname(urlsplit(url).path))
        return f"{path}[{extra}]" if path.exists() else plain
    if isinstance(source := noted.get("vcs_info"), dict):
        url = f"{source.get('vcs')}+{url}@{source.get('commit_id')}"
    return f"{plain} @ {url}"


def pip(wanted: str, editable: bool = False) -> str:
    """The pip command that installs ``wanted``, quoted for the shell."""
    quoted = shlex.quote(wanted)
    return f"pip install {'-e ' if editable else ''}{quoted}"
