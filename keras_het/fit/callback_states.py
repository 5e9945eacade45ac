"""What the callbacks of a `fit` remember, as arrays and JSON of a backup."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api

_logger = logging.getLogger(__name__)

PREFIX = "callbacks/"
"""Of the names of these arrays in a backup."""
_JSON = f"{PREFIX}json"
_MOST_LEVELS = 20
_Encoded: TypeAlias = tuple[Any, list[np.ndarray]]
"""A value as JSON, and the arrays that it names by number."""
Snapshot: TypeAlias = Mapping[str, Mapping[str, _Encoded]]
"""What callbacks remember, by their names and by attribute."""
# What these attributes hold belongs to the process, or is made again.
_KEPT_BY_KERAS: dict[str, tuple[str, ...]] = {
    "CSVLogger": ("keys",),
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "History": ("history", "epoch"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": (
        *("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    ),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_train_accumulated_time"),
}
_NOT_OF_A_TRAINING = (
    *(keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss, keras.metrics.Metric),
    *(tf.data.Dataset, tf.distribute.Strategy, logging.Logger, Path, ModuleType),
)
"""Kinds of values that a new process makes again, so that nobody misses them in a backup."""


# Of Keras's callbacks: the attributes that their results depend on, and the rows of a CSVLogger.
# Others: `get_state`, or attributes that are plain values, containers or objects of them.
class CallbackStates:
    """What the callbacks of a `fit` remember that they did not know when it began."""

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        counts: collections.Counter[str] = collections.Counter()
        for callback in callbacks:
            name = type(callback).__name__
            if _is_kept(callback):
                self._callbacks[f"{name} {counts[name]}"] = callback
                counts[name] += 1
        self._at_first = {
            (name, attribute): _digest(*encoded)
            for name, values in self.snapshot().items()
            for attribute, encoded in values.items()
        }
        self._named: set[str] = set()

    def snapshot(self) -> Snapshot:
        """Return what the callbacks remember now."""
        return {name: _encoded_values(callback) for name, callback in self._callbacks.items()}

    def export(self, earlier: Snapshot) -> dict[str, np.ndarray]:
        """Return all that has changed since the `fit` began, by its names in a backup."""
        states: dict[str, dict[str, Any]] = {}
        arrays: list[np.ndarray] = []
        for name, callback in self._callbacks.items():
            values = earlier[name] if name in earlier else _encoded_values(callback)
            for attribute, (value, own_arrays) in values.items():
                if self._at_first.get((name, attribute)) != _digest(value, own_arrays):
                    states.setdefault(name, {})[attribute] = [value, len(arrays)]
                    arrays += own_arrays
            self._name_what_is_lost(callback)
            # a step before the backup is not run again
            private_api.write_events(callback)
        numbered = {f"{PREFIX}{number}": array for number, array in enumerate(arrays)}
        return {_JSON: np.array(json.dumps(states)), **numbered}

    def restore(self, backup: Mapping[str, np.ndarray]) -> None:
        """Give the callbacks what the callbacks of the interrupted training remembered."""
        if _JSON not in backup:
            return
        states = json.loads(str(backup[_JSON]))
        if unknown := sorted(states.keys() - self._callbacks.keys()):
            _logger.warning(
                "The backup holds what callbacks remember that this fit does not have: %s. Give "
                "fit the callbacks of the interrupted training to continue them.",
                ", ".join(each.removesuffix(" 0") for each in unknown),
            )
        for name, callback in self._callbacks.items():
            found = {
                attribute: (value, _Arrays(backup, first))
                for attribute, (value, first) in states.get(name, {}).items()
            }
            if _has_protocol(callback):
                if found:
                    value, arrays = found[""]
                    callback.set_state(_decoded(value, arrays, None))
                continue
            for attribute, (value, arrays) in found.items():
                if attribute == _ROWS:
                    _rewrite(callback, value)
                else:
                    present = getattr(callback, attribute, None)
                    setattr(callback, attribute, _decoded(value, arrays, present))

    def _name_what_is_lost(self, callback: keras.callbacks.Callback) -> None:
        kind = type(callback).__name__
        if kind in self._named or _has_protocol(callback):
            return
        self._named.add(kind)
        lost = []
        for attribute, value in _values_of(callback).items():
            try:
                _encoded(value, [])
            except _NotPlainError:
                if not _is_made_again(value):
                    lost.append(f"{attribute} ({type(value).__name__})")
        if lost:
            _logger.warning(
                "Backups do not hold what %s remembers in %s. If a resumed training needs it, give "
                "the class get_state(), which returns numbers, strings, arrays or containers of "
                "them, and set_state(state).",
                kind,
                ", ".join(lost),
            )


def numbers_in(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the numbers among logs as JSON can hold them."""
    found = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {name: value.item() for name, value in found.items() if value.ndim == 0}


def _encoded_values(callback: keras.callbacks.Callback) -> dict[str, _Encoded]:
    """Return what a backup can hold of a callback, by attribute."""
    found: dict[str, _Encoded] = {}
    for attribute, value in _values_of(callback).items():
        arrays: list[np.ndarray] = []
        with contextlib.suppress(_NotPlainError):
            found[attribute] = _encoded(value, arrays), arrays
    return found


def _digest(value: Any, arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(value).encode())
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


_ROWS = "the rows"
_OWN_ROOM = __name__.partition(".")[0]


def _has_protocol(callback: keras.callbacks.Callback) -> bool:
    return all(callable(getattr(callback, name, None)) for name in ("get_state", "set_state"))


def _is_kept(callback: keras.callbacks.Callback) -> bool:
    """Tell whether backups hold what a callback remembers; ours keep their own state."""
    if _has_protocol(callback):
        return True
    is_ours = type(callback).__module__.partition(".")[0] == _OWN_ROOM
    return not is_ours and not isinstance(
        callback, (keras.callbacks.BackupAndRestore, keras.callbacks.ProgbarLogger)
    )


def _values_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return what may be kept of a callback, by attribute."""
    if _has_protocol(callback):
        return {"": callback.get_state()}
    of_keras = [each for each in type(callback).__mro__ if each.__module__.startswith("keras.")]
    used_by_keras = {
        name
        for each in of_keras
        for function in vars(each).values()
        if isinstance(function, FunctionType)
        for name in function.__code__.co_names
    }
    kept = {name for each in of_keras for name in _KEPT_BY_KERAS.get(each.__name__, ())}
    values = {
        name: value
        for name, value in vars(callback).items()
        if name in kept or name not in used_by_keras
    }
    if isinstance(callback, keras.callbacks.CSVLogger):
        values[_ROWS] = _rows(callback)
    return values


def _rows(logger: keras.callbacks.CSVLogger) -> str | None:
    """Return the whole file of a logger; None where this process does not write it."""
    if logger.csv_file is None:
        return None
    with Path(logger.filename).open(newline="") as file:
        return file.read()


def _rewrite(logger: keras.callbacks.CSVLogger, rows: str | None) -> None:
    if logger.csv_file is None or rows is None:
        return
    logger.csv_file.seek(0)
    logger.csv_file.truncate()
    logger.csv_file.write(rows)
    logger.csv_file.flush()
    logger.append_header = not rows


class _NotPlainError(Exception):
    """A value that a backup cannot hold."""


class _Arrays:
    """The arrays of an encoded value in a backup."""

    def __init__(self, backup: Mapping[str, np.ndarray], first: int) -> None:
        self._backup, self._first = backup, first

    def __getitem__(self, number: int) -> np.ndarray:
        return self._backup[f"{PREFIX}{self._first + number}"]


def _encoded(value: Any, arrays: list[np.ndarray], level: int = 0) -> Any:
    """Return what JSON can hold; arrays are appended to a list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if level > _MOST_LEVELS:
        raise _NotPlainError

    def inner(each: Any) -> Any:
        return _encoded(each, arrays, level + 1)

    def array(content: Any, kind: str) -> dict[str, int]:
        found = np.array(content)
        if found.dtype.hasobject:
            raise _NotPlainError
        arrays.append(found)
        return {kind: len(arrays) - 1}

    if isinstance(value, (np.ndarray, np.generic)):
        return array(value, "array" if isinstance(value, np.ndarray) else "scalar")
    if isinstance(value, (keras.Variable, tf.Variable)):
        return array(keras.ops.convert_to_numpy(value), "variable")
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return array(value.numpy(), "tensor")
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.random.Generator):
        return {"generator": inner(value.bit_generator.state)}
    if isinstance(value, random.Random):
        return {"random": inner(value.getstate())}
    if isinstance(value, Mapping):
        return {"mapping": [[inner(key), inner(each)] for key, each in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((inner(each) for each in value), key=json.dumps)}
    if isinstance(value, tuple):
        return {"tuple": [inner(each) for each in value]}
    if isinstance(value, (list, collections.deque)):
        return [inner(each) for each in value]
    if _is_of_the_user(value):
        return {"object": {name: inner(each) for name, each in vars(value).items()}}
    raise _NotPlainError


def _is_made_again(value: Any) -> bool:
    return callable(value) or isinstance(value, _NOT_OF_A_TRAINING)


def _is_of_the_user(value: Any) -> bool:
    """Tell whether a value is an object of a class that a user has written."""
    package = type(value).__module__.partition(".")[0]
    others = (*sys.stdlib_module_names, "keras", "tensorflow", "numpy", _OWN_ROOM)
    has_attributes = hasattr(value, "__dict__") and not _is_made_again(value)
    return has_attributes and (package == "__main__" or package not in others)


def _decoded(value: Any, arrays: _Arrays, present: Any) -> Any:
    """Return the value that was encoded; a present container or object of its kind takes it."""
    if isinstance(value, list):
        items = [_decoded(each, arrays, None) for each in value]
        return _refilled(present, (list, collections.deque), items)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _DECODERS[kind](content, arrays, present)


def _variable(content: int, arrays: _Arrays, present: Any) -> Any:
    if not isinstance(present, (keras.Variable, tf.Variable)):
        return arrays[content]
    present.assign(arrays[content])
    return present


def _generator(content: Any, arrays: _Arrays, present: Any) -> Any:
    if isinstance(present, np.random.Generator):  # a backup chooses no class
        present.bit_generator.state = _decoded(content, arrays, None)
    return present


def _random(content: Any, arrays: _Arrays, present: Any) -> random.Random:
    found = present if isinstance(present, random.Random) else random.Random()
    found.setstate(_decoded(content, arrays, None))
    return found


def _mapping(content: Any, arrays: _Arrays, present: Any) -> Any:
    kind = collections.abc.MutableMapping
    before = present if isinstance(present, kind) else {}
    items = {}
    for encoded, each in content:
        key = _decoded(encoded, arrays, None)
        items[key] = _decoded(each, arrays, before.get(key))
    return _refilled(present, kind, items)


def _set(content: Any, arrays: _Arrays, present: Any) -> Any:
    items = {_decoded(each, arrays, None) for each in content}
    return frozenset(items) if isinstance(present, frozenset) else _refilled(present, set, items)


def _refilled(present: Any, kind: Any, items: Any) -> Any:
    """Return the present container with other items, as others may hold it; or the items."""
    if not isinstance(present, kind):
        return items
    present.clear()
    (present.extend if isinstance(items, list) else present.update)(items)
    return present


def _tuple(content: Any, arrays: _Arrays, present: Any) -> Any:
    items = tuple(_decoded(each, arrays, None) for each in content)
    return type(present)(*items) if hasattr(present, "_fields") else items


def _object(content: Mapping[str, Any], arrays: _Arrays, present: Any) -> Any:
    for name, each in content.items() if _is_of_the_user(present) else ():
        setattr(present, name, _decoded(each, arrays, getattr(present, name, None)))
    return present


_DECODERS: dict[str, Callable[[Any, _Arrays, Any], Any]] = {
    "array": lambda content, arrays, _: arrays[content],
    "scalar": lambda content, arrays, _: arrays[content][()],
    "tensor": lambda content, arrays, _: tf.convert_to_tensor(arrays[content]),
    "variable": _variable,
    "bytes": lambda content, arrays, _: bytes.fromhex(content),
    "generator": _generator,
    "random": _random,
    "mapping": _mapping,
    "set": _set,
    "tuple": _tuple,
    "object": _object,
}
