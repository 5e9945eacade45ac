"""Writes to shared paths, reserved for the chief.

Every worker runs the same script, so every worker calls `model.save("model.keras")` and has the
same callbacks. On the other workers those calls do nothing for a model of a
`HeterogeneousStrategy`; if they are a line of the script, they say so once. Models without such a
strategy are not affected. Installed when a strategy over several workers is created.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras

from keras_het.fit.session import FitSession

_logger = logging.getLogger("keras_het")

_SAVING = ("save", "save_weights", "export")
_WRITING_CALLBACKS: dict[str, tuple[str, ...]] = {
    # Every worker still reads the backup at the start of training.
    "BackupAndRestore": ("_save_model", "on_train_end"),
    "CSVLogger": ("on_train_begin", "on_epoch_end", "on_train_end"),
    "TensorBoard": (
        "on_train_begin",
        "on_train_end",
        "on_epoch_begin",
        "on_epoch_end",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_begin",
        "on_test_end",
    ),
}


def install_chief_only() -> None:
    """Make models and callbacks write nothing on workers other than the chief; idempotent."""
    for name in _SAVING:
        _replace(keras.Model, name, lambda model: model, says_so=True)
    for class_name, method_names in _WRITING_CALLBACKS.items():
        for name in method_names:
            _replace(getattr(keras.callbacks, class_name), name, lambda callback: callback.model)
    _replace_set_model()


def writes(model: keras.Model) -> bool:
    """Tell whether this process writes `model`'s files."""
    strategy = getattr(model, "distribute_strategy", None)
    return bool(getattr(strategy, "is_chief", True))


def _replace(
    owner: type, name: str, model_of: Callable[[Any], keras.Model], says_so: bool = False
) -> None:
    original = getattr(owner, name)
    if hasattr(original, "chief_only"):
        return

    @functools.wraps(original)
    def write(self: keras.Model | keras.callbacks.Callback, *args: object, **kwargs: object) -> Any:
        if writes(model_of(self)):
            return original(self, *args, **kwargs)
        model = model_of(self)
        # within fit, the caller is a callback such as ModelCheckpoint, not a line of the script
        if says_so and FitSession.of(model) is None:
            _say_once(name, model.distribute_strategy.worker_index)
        return None

    write.chief_only = True  # type: ignore[attr-defined]
    setattr(owner, name, write)


@functools.cache
def _say_once(name: str, worker_index: int) -> None:
    _logger.warning(
        "model.%s does nothing on worker %d: the chief, worker 0, writes for all workers.",
        name,
        worker_index,
    )


def _replace_set_model() -> None:
    """Hook `set_model`: TensorBoard opens its files as soon as it knows the model."""
    original = keras.callbacks.TensorBoard.set_model
    if hasattr(original, "chief_only"):
        return

    @functools.wraps(original)
    def set_model(self: keras.callbacks.TensorBoard, model: keras.Model) -> None:
        if writes(model):
            original(self, model)
        else:
            keras.callbacks.Callback.set_model(self, model)

    set_model.chief_only = True  # type: ignore[attr-defined]
    keras.callbacks.TensorBoard.set_model = set_model
