"""Where metrics go beside the files of a run: the integrations of transformers' Trainer."""

from collections.abc import Sequence

from linformers.training.options import option


def check_integrations(names: Sequence[str] | None) -> None:
    """Raise a ValueError for integrations that transformers does not know, or whose package is not installed."""
    if not names:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(
                f"{option('log_to')} {name} is not an integration of transformers; there are {', '.join(INTEGRATION_TO_CALLBACK)}"
            )
        if name not in get_available_reporting_integrations():
            raise ValueError(
                f"{option('log_to')} {name} needs a package that is not installed; run: pip install {name}"
            )
