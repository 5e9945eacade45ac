r"""Writes the formulas of docstrings as those of pages: $x$ for :math:`x`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_INLINE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^\.\. math::\s*(.+(?:\n[ ]+.+)*)$", re.MULTILINE)


class MathOfDocstrings(griffe.Extension):
    """Changes the docstring of each object as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this with each module, class, function and attribute."""
        if obj.docstring is not None:
            text = _INLINE.sub(r"$\1$", obj.docstring.value)
            obj.docstring.value = _BLOCK.sub(r"$$\n\1\n$$", text)
