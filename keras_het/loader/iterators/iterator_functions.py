"""Keeps the functions of a pipeline as long as its iterator."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import Any


def hold_functions_of(iterator: Any, holder: Any) -> None:
    """Keeps the functions of a pipeline until after its iterator is gone.

    TensorFlow crashes if the garbage collector takes the functions of a pipeline before the
    iterator whose threads are calling them, which it may do where both are in one cycle (an
    exception's traceback is enough).
    """
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while True:
            _held.pop(_condemned.pop(), None)
    key = next(_keys)
    _held[key] = holder
    weakref.finalize(iterator, _condemned.append, key).atexit = False


_held: dict[int, Any] = {}
_condemned: list[int] = []
_keys = itertools.count()
