"""Counts what a host reads from devices other than CPU:0, on which host values lie."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework.ops import EagerTensor

_HOST = "CPU:0"


class Reads(keras.callbacks.Callback):
    """Counts what the main thread reads from a device in each step, and notes measured ones.

    That is a tensor's value in Python, and a result on the host of what lies on a device.
    """

    def __init__(self, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
        super().__init__()
        self.measured: set[int] = set()
        self.places: dict[int, str] = {}
        self.num_steps = 0
        self._step: int | None = None
        # NumPy's own functions take a tensor's buffer, without a call of its method
        for owner, name in ((EagerTensor, "_numpy"), (np, "array"), (np, "asarray")):
            set_attribute(owner, name, self._counting(getattr(owner, name)))
        for name, inputs in (("TFE_Py_FastPathExecute", _all), ("TFE_Py_Execute", _of_execute)):
            executing = self._counting_results(getattr(pywrap_tfe, name), inputs)
            set_attribute(pywrap_tfe, name, executing)

    @property
    def in_plain_steps(self) -> dict[int, str]:
        """Where the main thread reads first, by the number of a step that is not measured."""
        # Keras begins one more step to find the end of data whose length it does not know
        plain = (step for step in range(self.num_steps) if step not in self.measured)
        return {step: self.places[step] for step in plain if step in self.places}

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(_is_on_device(value))
            return read(value, *args, **kwargs)

        return counting

    def _counting_results(
        self, execute: Callable[..., Any], inputs_of: Callable[..., Iterable[Any]]
    ) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            results = execute(*args, **kwargs)
            made = results if isinstance(results, (list, tuple)) else [results]
            self._note(
                any(isinstance(each, EagerTensor) and _HOST in each.backing_device for each in made)
                and any(map(_is_on_device, inputs_of(*args)))
            )
            return results

        return counting

    def _note(self, is_read: bool) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_read and is_main and self._step is not None and self._step not in self.places:
            frames = traceback.extract_stack()[:-2]
            own = [frame for frame in frames if "keras_het" in frame.filename] or frames
            self.places[self._step] = f"{own[-1].filename}:{own[-1].lineno} {own[-1].name}"

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step = self.num_steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        sampled = self.model.distribute_strategy.extended.stop_request.sampled
        if sampled is not None and sampled.was_measured:
            self.measured.add(self.num_steps)
        self._step, self.num_steps = None, self.num_steps + 1


def _is_on_device(value: Any) -> bool:
    if not isinstance(value, EagerTensor):
        return False
    # what refers to a variable is on the host itself
    return _HOST not in (value.device if value.dtype == tf.resource else value.backing_device)


def _all(*args: Any) -> Iterable[Any]:
    for each in args:
        yield from each if isinstance(each, (list, tuple)) else [each]


def _of_execute(handle: Any, device: Any, name: Any, inputs: Iterable[Any], *rest: Any) -> Any:
    return inputs
