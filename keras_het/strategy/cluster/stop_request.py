"""Stop of training at a step boundary, the same one on all workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_het.strategy.cluster.stop_signals import SIGNALS, stop_signals

_logger = logging.getLogger(__name__)

_LOOPS = ("fit", "evaluate", "predict")


class StopRequest:
    """The stop this process was asked for, and what all workers have agreed on.

    A worker that stopped by itself would leave the others in a collective. Its request therefore
    travels in the collective of the next step, and all workers stop after that step.

    Args:
        device: name of the device of this worker's first replica.
        barrier: waits until all workers have called it.
    """

    def __init__(self, device: str, barrier: Callable[[], None]) -> None:
        self._barrier = barrier
        self._received: int | None = None
        self._agreed: int | None = None
        self._depth = 0
        self._has_begun_steps = False
        self._is_carried = False
        # On the step's device, because XLA may compile the step.
        with tf.init_scope(), tf.device(device):
            self._own = tf.Variable(tf.zeros([len(SIGNALS)]), trainable=False)
            self._everyone = tf.Variable(tf.zeros([len(SIGNALS)]), trainable=False)

    @property
    def is_in_steps(self) -> bool:
        """Whether a Keras loop is running whose first step has begun."""
        return self._depth > 0 and self._has_begun_steps

    def ask(self, number: int) -> None:
        """Request a stop at the next step boundary; called in a signal handler.

        Args:
            number: number of the signal.
        """
        self._received = number

    @property
    def is_agreed(self) -> bool:
        """Whether the latest step was the last one, on all workers alike."""
        if self._agreed is None and self._is_carried:
            asked = tf.raw_ops.ReadVariableOp(resource=self._everyone.handle, dtype=tf.float32)
            for number, workers in zip(SIGNALS, asked.numpy(), strict=True):
                if workers > 0 and self._agreed is None:
                    self._agreed = number
        return self._agreed is not None

    def end_if_agreed(self) -> None:
        """End the script if the latest step was the last one.

        Raises:
            SystemExit: with exit code 143, after SIGTERM.
            KeyboardInterrupt: after Ctrl-C.
        """
        if self.is_agreed:
            self._end()

    def contribution(self, is_first: bool, dtype: tf.DType) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph.

        Args:
            is_first: whether it is the first replica of its worker.
            dtype: type of the other values that are summed.
        """
        return tf.cast(self._own.read_value() if is_first else tf.zeros_like(self._own), dtype)

    def record(self, summed: tf.Tensor) -> None:
        """Record the requests of all replicas; called in the graph, by one local replica."""
        self._everyone.assign(tf.cast(summed, tf.float32))

    def watch_steps(self, model: keras.Model | None, attribute: str, is_carried: bool) -> None:
        """Make a Keras loop stop between two steps; called while its first step is traced.

        Keras looks up the function in every step: the second step comes through here first.

        Args:
            model: the `keras.Model`.
            attribute: "train_function", "test_function" or "predict_function".
            is_carried: whether its steps carry requests to the other workers; otherwise each worker
                stops independently.
        """
        function = getattr(model, attribute, None)
        self._has_begun_steps, self._is_carried = True, is_carried
        if function is not None and not hasattr(function, "ends_at_boundaries"):
            setattr(model, attribute, self._at_boundaries(function, is_carried))

    def _at_boundaries(
        self, function: Callable[..., object], is_carried: bool
    ) -> Callable[..., object]:
        @functools.wraps(function)
        def step(*args: object, **kwargs: object) -> object:
            self._has_begun_steps, self._is_carried = True, is_carried
            self.end_if_agreed()
            if self._received is not None and is_carried:
                self._own.assign([float(number == self._received) for number in SIGNALS])
            result = function(*args, **kwargs)
            if not is_carried:
                self._agreed = self._received
            return result

        step.ends_at_boundaries = True  # type: ignore[attr-defined]
        return step

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Wrap a Keras loop; an outstanding stop request takes effect at its end."""
        if self._depth == 0:
            self._has_begun_steps = False
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth > 1 or self._received is None:
                raise
            # most likely because the same signal ended another worker
            _logger.warning("Ends by a signal, after %s: %s", type(error).__name__, error)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.end_if_agreed()
            if self._received is not None:
                self._end()

    def _end(self) -> None:
        number = self._received or self._agreed or signal.SIGTERM
        if self._received is None:
            name = signal.Signals(number).name
            _logger.warning("Another worker has received %s: all workers end here.", name)
        if self._agreed is not None and self._is_carried:
            # The first worker to leave would break the step that others still finish.
            with contextlib.suppress(Exception):
                self._barrier()
        self._received = self._agreed = None
        self._own.assign(tf.zeros_like(self._own))
        self._everyone.assign(tf.zeros_like(self._everyone))
        raise stop_signals.exception(number)


def install_loops() -> None:
    """Register the loops of models that have a `StopRequest` with it; idempotent."""
    for name in _LOOPS:
        original = getattr(keras.Model, name)
        if not hasattr(original, "ends_at_boundaries"):
            setattr(keras.Model, name, _known(original))


def _known(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loop(model: keras.Model, *args: object, **kwargs: object) -> Any:
        strategy = getattr(model, "distribute_strategy", None)
        request = getattr(strategy, "_stop_request", None)
        if request is None:
            return original(model, *args, **kwargs)
        with request.loop():
            return original(model, *args, **kwargs)

    loop.ends_at_boundaries = True  # type: ignore[attr-defined]
    return loop
