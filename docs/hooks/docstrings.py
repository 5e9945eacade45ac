r"""Writes formulas of docstrings as pages do, $x$ for :math:`x`, and notes what is experimental."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import griffe

_INLINE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^\.\. math::\s*(.+(?:\n[ ]+.+)*)$", re.MULTILINE)

_STABILITY = Path(__file__).parents[2] / "keras_het" / "stability.py"
_NOTE = runpy.run_path(str(_STABILITY))["NOTE"]


class MathOfDocstrings(griffe.Extension):
    """Changes the docstring of each object as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this with each module, class, function and attribute."""
        if obj.docstring is not None:
            if _is_experimental(obj):
                obj.docstring.value += f"\n\n{_NOTE}"
            text = _INLINE.sub(r"$\1$", obj.docstring.value)
            obj.docstring.value = _BLOCK.sub(r"$$\n\1\n$$", text)


def _is_experimental(obj: griffe.Object) -> bool:
    """Whether the decorator marks it, or a package that it is in, as `keras_het.stability` says."""
    if obj.is_module or not obj.parent.is_module:
        return False
    if any(str(each.value) == "experimental" for each in getattr(obj, "decorators", ())):
        return True
    package = obj.parent
    while package is not None and "__keras_het_stability__" not in package.members:
        package = package.parent
    return package is not None
