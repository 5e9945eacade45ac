"""Counts what a host reads from devices other than CPU:0, on which host values lie."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from tensorflow.python.framework.ops import EagerTensor


class Reads(keras.callbacks.Callback):
    """Counts what the main thread reads from a device in each step, and notes measured ones."""

    def __init__(self, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
        super().__init__()
        self.of_steps: collections.Counter[int] = collections.Counter()
        self.measured: set[int] = set()
        self._num_steps = 0
        self._step: int | None = None
        # NumPy's own functions take a tensor's buffer, without a call of its method
        for owner, name in ((EagerTensor, "_numpy"), (np, "array"), (np, "asarray")):
            set_attribute(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            is_tensor = isinstance(value, EagerTensor)
            if self._step is not None and is_main and is_tensor:
                self.of_steps[self._step] += "CPU:0" not in value.backing_device
            return read(value, *args, **kwargs)

        return counting

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step, self._num_steps = self._num_steps, self._num_steps + 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        sampled = self.model.distribute_strategy._stop_request.sampled
        if sampled is not None and sampled.was_measured:
            self.measured.add(self._num_steps - 1)
        self._step = None
