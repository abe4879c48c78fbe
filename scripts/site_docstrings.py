"""Extension of griffe for the documentation site: `[A][n]` in a docstring is an index, not a link."""

from __future__ import annotations

import re
from typing import Any

import griffe


class IndicesAreNoLinks(griffe.Extension):
    """Escapes what Markdown would read as a link with a reference."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\]\[", r"]\\[", obj.docstring.value)
