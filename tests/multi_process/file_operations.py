"""Every file operation of a save, to look at, fail or end the process at each."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import keras

# An audit hook is told of these; what it is not told of is wrapped.
AUDITED = ("open", "os.rename", "os.remove", "os.mkdir")
WRAPPED = (
    (os, "fsync"),
    (os, "posix_fallocate"),
    (h5py, "File"),
    (h5py.File, "close"),
    (keras.Model, "save_weights"),
)
_watches: list[Watch] = []


class Watch(contextlib.ExitStack):
    """Calls `look` before each file operation below a folder, and after those of libraries.

    Args:
        path: the folder.
        look: gets the number of the operation, counted from 1.

    Attributes:
        seen: names of the operations.
    """

    def __init__(self, path: Path, look: Callable[[int], None]) -> None:
        super().__init__()
        self._path, self._look, self._is_looking = str(path), look, False
        self.seen: list[str] = []

    def __enter__(self) -> Watch:
        super().__enter__()
        self.seen, self._is_looking = [], False
        for owner, name in WRAPPED:
            self.enter_context(mock.patch.object(owner, name, self._wrapped(owner, name)))
        _watches.append(self)
        self.callback(_watches.remove, self)
        return self

    def note(self, name: str) -> None:
        if self._is_looking:
            return
        self._is_looking = True
        self.seen.append(name)
        self._look(len(self.seen))
        self._is_looking = False

    def note_audited(self, name: str, path: str) -> None:
        if self._path in path:
            self.note(name)

    def _wrapped(self, owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            result = original(*args, **kwargs)
            self.note(f"after {name}")
            return result

        return call


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watches and event in AUDITED:
        for watch in _watches:
            watch.note_audited(event, str(arguments[0]))


sys.addaudithook(_audit)
