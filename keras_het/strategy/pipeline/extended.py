"""The part of the pipeline strategy that TensorFlow calls: where variables lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_het.strategy.extended import HeterogeneousExtended
from keras_het.value_types import Nest


class PipelineExtended(HeterogeneousExtended):
    """Variables are plain ones, on the host until a stage's device takes them."""

    _target = "CPU:0"

    @contextlib.contextmanager
    def variables_on(self, device: str) -> Iterator[None]:
        """Create the variables of this block on a device."""
        before, self._target = self._target, device
        try:
            with tf.device(device):
                yield
        finally:
            self._target = before

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> Any:
        place = kwargs.pop("colocate_with", None)
        with tf.device(self._target if place is None else place.device):
            return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        pass

    def _update(
        self,
        var: tf.Variable,
        fn: Callable[..., Nest],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Nest:
        """Update a variable on its own device."""
        with tf.device(var.device), tf.distribute.ReplicaContext(self._container_strategy(), 0):
            return fn(var, *args, **kwargs)

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1
