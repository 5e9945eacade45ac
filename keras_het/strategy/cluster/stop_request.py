"""Stop of training at a step boundary, the same one on all workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_het.fit.session import STEP_FUNCTIONS, Batches, FitSession, Rank, StepFunction
from keras_het.strategy.cluster.departure import call_for
from keras_het.strategy.cluster.stop_signals import SIGNALS, stop_signals
from keras_het.strategy.cluster.unfinished_step import StepGuard, UnfinishedStep

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)

_SECONDS_TO_MEET = 2.0


class StopRequest:
    """The stop this process was asked for, and what all workers have agreed on.

    A worker that stopped by itself would leave the others in a collective. Its request therefore
    travels in the collective of the next step, and all workers stop after that step.
    """

    def __init__(self, strategy: HeterogeneousStrategy, is_alone: bool) -> None:
        # the strategy holds this, and is to be freed with its last reference
        self._strategy, self._is_alone = weakref.ref(strategy), is_alone
        device = strategy.extended.worker_devices[0]
        self.unfinished = UnfinishedStep(device)
        self.guard: StepGuard | None = None
        self.tell: Callable[[], None] = lambda: None
        self._hurry, self._is_hurried = threading.Lock(), False
        self._was_saved = threading.Event()
        self._received: int | None = None
        self._agreed: int | None = None
        self._depth = 0
        self._has_begun_steps = False
        self._is_carried = False
        self._carries: weakref.WeakKeyDictionary[keras.Model, dict[str, bool]] = (
            weakref.WeakKeyDictionary()
        )
        # On the step's device, because XLA may compile the step.
        with tf.init_scope(), tf.device(device):
            self._own = tf.Variable(tf.zeros([len(SIGNALS)]), trainable=False)
            self._everyone = tf.Variable(tf.zeros([len(SIGNALS)]), trainable=False)

    @property
    def is_in_steps(self) -> bool:
        """Whether a Keras loop is running whose first step has begun."""
        stops_at_boundaries = self.guard is not None or not self._is_alone
        is_in_steps = self._depth > 0 and self._has_begun_steps and stops_at_boundaries
        return is_in_steps and not self._was_saved.is_set()

    def ask(self, number: int) -> None:
        """Request a stop at the next step boundary; called in a signal handler."""
        self._received = number

    def guard_steps(
        self, session: FitSession, mark: Callable[[], Any], save: Callable[[Any, Any], bool]
    ) -> StepGuard:
        """Have the last finished step of a `fit` saved if the process must end in the next one."""
        self.guard = guard = StepGuard(session.model, mark, save, self.unfinished)
        session.add_layer(Rank.GUARD_STATE, guard.run_step)
        session.add_layer(Rank.END_IF_ASKED, functools.partial(self._run_step, session))
        session.on_end(lambda: setattr(self, "guard", None))
        return guard

    def end_now(self, number: int, deadline: float) -> None:
        """Save the last finished step, and let the process end in the running one."""
        with self._hurry:
            if self._is_hurried:
                return
            self._is_hurried = True
        self.tell()
        try:
            if self.guard is not None and not self.guard.save_last_step(deadline):
                _logger.warning("The running step did not finish: the newest backup is older.")
        finally:
            self._agreed = self._agreed or number
            self._was_saved.set()

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
        if self.is_agreed:
            self._end()

    def contribution(self, is_first: bool, dtype: tf.DType) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph."""
        return tf.cast(self._own.read_value() if is_first else tf.zeros_like(self._own), dtype)

    def record(self, summed: tf.Tensor) -> None:
        """Record the requests of all replicas; called in the graph, by one local replica."""
        self._everyone.assign(tf.cast(summed, tf.float32))

    def note_step(self, model: keras.Model | None, attribute: str, is_carried: bool) -> None:
        """Note, where a step is traced, whether its sum over all replicas carries requests."""
        self._has_begun_steps, self._is_carried = True, is_carried
        if model is not None:
            self._carries.setdefault(model, {})[attribute] = is_carried

    def watch(self, session: FitSession) -> None:
        """Let a loop of Keras end between two steps; of a lone process only if they are guarded."""
        if not self._is_alone:
            session.add_layer(Rank.END_IF_ASKED, functools.partial(self._run_step, session))

    def _run_step(self, session: FitSession, function: StepFunction, batches: Batches) -> Any:
        noted = self._carries.get(session.model, {})
        is_carried = noted.get(STEP_FUNCTIONS[session.loop])
        if is_carried is not None:  # else the first step is yet to be traced
            self._has_begun_steps, self._is_carried = True, is_carried
            self.end_if_agreed()
            if self._received is not None and is_carried:
                self._own.assign([float(number == self._received) for number in SIGNALS])
        result = function(batches)
        if not self._is_carried:
            self._agreed = self._received
        return result

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Wrap a Keras loop; an outstanding stop request takes effect at its end."""
        if self._depth == 0:
            self._has_begun_steps = False
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth > 1 or (self._received is None and not self._is_hurried):
                raise
            # most likely because the same signal ended another worker
            _logger.warning("Ends by a signal, after %s: %s", type(error).__name__, error)
        finally:
            if self._is_hurried:
                self._was_saved.wait()
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
        is_together = self._agreed is not None and self._is_carried and not self._is_hurried
        if is_together and (strategy := self._strategy()) is not None:
            # The first worker to leave would break the step that others still finish.
            call_for(_SECONDS_TO_MEET, strategy.barrier)
        self._received = self._agreed = None
        self._own.assign(tf.zeros_like(self._own))
        self._everyone.assign(tf.zeros_like(self._everyone))
        raise stop_signals.exception(number)
