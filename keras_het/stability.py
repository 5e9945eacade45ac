"""Which public symbols are experimental: a minor version may change them. All others are stable.

`@experimental` marks one; `__keras_het_stability__ = "experimental"` in a package marks all in it.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

NOTE = "Note:\n    Experimental: a minor version may change it."
Symbol = TypeVar("Symbol", bound=Any)


def experimental(symbol: Symbol) -> Symbol:
    """Mark a public symbol, and say so in its docstring."""
    symbol.__keras_het_stability__ = "experimental"
    symbol.__doc__ = f"{inspect.getdoc(symbol) or ''}\n\n{NOTE}"
    return symbol
