"""For the API reference: roles such as :class:`x` in docstrings become plain code, and an example a section of code."""

import re
from typing import Any

from griffe import Extension, Object


class Roles(Extension):
    """Rewrite the docstrings of all that is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = re.sub(r":(?:class|func|meth|mod|attr|data):`~?([^`]*)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
