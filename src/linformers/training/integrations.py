"""Where metrics go beside the files of a run: the integrations of transformers' Trainer."""

from collections.abc import Sequence
from importlib.util import find_spec

from linformers.training.options import option

# Their packages have other names, or they need more than a package.
UNNAMED = ("azure_ml", "kubeflow")
# transformers has a callback for them, but never reports them as available: they work only inside a task of theirs.
REFUSED = ("flyte",)


def check_integrations(names: Sequence[str] | None) -> None:
    """Raise a ValueError for integrations that transformers does not know, or which are not available."""
    if not names:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    known = [name for name in INTEGRATION_TO_CALLBACK if name not in REFUSED]
    for name in names:
        if name not in known:
            what = "works only inside a task of its own" if name in REFUSED else "is not an integration of transformers"
            raise ValueError(f"{option('log_to')} {name} {what}; there are {', '.join(known)}")
        if name not in get_available_reporting_integrations():
            if name in UNNAMED or find_spec(name) is not None:
                why = "is not available here; transformers' page about callbacks says what it needs besides its package"
            else:
                why = f"needs a package that is not installed; run: pip install {name}"
            raise ValueError(f"{option('log_to')} {name} {why}")
