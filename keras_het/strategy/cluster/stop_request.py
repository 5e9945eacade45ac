"""Stop of training at a step boundary, the same one on all workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_het.fit.session import STEP_FUNCTIONS, Batches, FitSession, Rank, StepFunction
from keras_het.strategy.cluster.stop_signals import SIGNALS, call_for, stop_signals
from keras_het.strategy.measure.emulated_device import until_computed
from keras_het.strategy.measure.late_reads import LAG, LateReads, Read

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy
    from keras_het.strategy.measure.sampled_steps import SampledSteps

_logger = logging.getLogger(__name__)

_SECONDS_TO_MEET = 2.0
# a signal of each kind, to measure closely, and an interval between measured steps
_NUM_FLAGS = len(SIGNALS) + 2


# A worker that stopped by itself would leave the others in a collective: its request travels in the
# collective of the next step, after which, or a few steps later, all stop.
class StopRequest:
    """The stop this process was asked for, and what all workers have agreed on."""

    def __init__(self, strategy: HeterogeneousStrategy, is_alone: bool) -> None:
        # the strategy holds this, and is to be freed with its last reference
        self._strategy, self._is_alone = weakref.ref(strategy), is_alone
        device = strategy.extended.worker_devices[0]
        self.tell: Callable[[], None] = lambda: None
        self._ends_loops = not is_alone
        self._hurries = False
        self._received: int | None = None
        self._agreed: int | None = None
        self._depth = 0
        self._has_begun_steps = False
        self._is_carried = False
        self._carries: weakref.WeakKeyDictionary[keras.Model, dict[str, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._reads = LateReads(LAG if strategy.extended.works_ahead else 0, until_computed)
        self.sampled: SampledSteps | None = None
        """The running `fit`'s sampled steps, whose flags travel with these."""
        self._sent = [0.0] * _NUM_FLAGS
        # On the step's device, because XLA may compile the step.
        with tf.init_scope(), tf.device(device):
            self._own = tf.Variable(tf.zeros([_NUM_FLAGS]), trainable=False)
            self._everyone = tf.Variable(tf.zeros([_NUM_FLAGS]), trainable=False)

    @property
    def is_in_steps(self) -> bool:
        """Whether a Keras loop is running whose first step has begun."""
        is_in_steps = self._depth > 0 and self._has_begun_steps
        return is_in_steps and self._ends_loops and not self._hurries

    def ask(self, number: int) -> None:
        """Request a stop at the next step boundary; called in a signal handler."""
        self._received = number

    def end_now(self, number: int) -> None:
        """Let the process end in the running step, and tell the other workers."""
        self._received, self._hurries = self._received or number, True
        self.tell()

    @property
    def is_agreed(self) -> bool:
        """Whether the latest step was the last one, on all workers alike."""
        return self._agreed is not None

    def end_if_agreed(self) -> None:
        """End the script after a loop of Keras, if a worker was asked to."""
        self._note(self._reads.take(all_of_them=True))
        if self.is_agreed:
            self._end()

    def _note(self, reads: Iterable[Read]) -> None:
        for flags, _ in reads:
            signals, others = flags[: len(SIGNALS)], flags[len(SIGNALS) :]
            asked = [number for number, count in zip(SIGNALS, signals, strict=True) if count > 0]
            self._agreed = self._agreed or next(iter(asked), None)
            if self.sampled is not None:
                self.sampled.agree(*others)

    def _send_flags(self) -> None:
        flags = [float(number == self._received) for number in SIGNALS]
        flags += self.sampled.flags if self.sampled else (0.0, 0.0)
        if flags != self._sent:
            self._own.assign(flags)
            self._sent = flags

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

    def watch(self, session: FitSession, saves: bool = False) -> None:
        """Let a loop of Keras end between two steps; of a lone process only if it saves then."""
        if self._is_alone and not saves:
            return
        session.add_layer(Rank.END_IF_ASKED, functools.partial(self._run_step, session))
        if not self._ends_loops:
            self._ends_loops = True
            session.on_end(lambda: setattr(self, "_ends_loops", False))

    def _run_step(self, session: FitSession, function: StepFunction, batches: Batches) -> Any:
        noted = self._carries.get(session.model, {})
        is_carried = noted.get(STEP_FUNCTIONS[session.loop])
        if is_carried is not None:  # else the first step is yet to be traced
            self._has_begun_steps, self._is_carried = True, is_carried
            if self.is_agreed:
                self._end()
            if is_carried:
                self._send_flags()
        extended = session.model.distribute_strategy.extended
        is_in_fit, extended.is_between_steps = extended.is_between_steps, False
        result = function(batches)
        extended.is_between_steps = is_in_fit
        if self._is_carried:
            flags = tf.raw_ops.ReadVariableOp(resource=self._everyone.handle, dtype=tf.float32)
            self._reads.add(flags)
            self._note(self._reads.take())
        else:
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
        is_together = self.is_agreed and self._is_carried and not self._hurries
        if is_together and (strategy := self._strategy()) is not None:
            # The first worker to leave would break the step that others still finish.
            call_for(_SECONDS_TO_MEET, strategy.barrier)
        self._received, self._agreed, self._hurries = None, None, False
        self._reads.clear()
        self._sent = [0.0] * _NUM_FLAGS
        self._own.assign(self._sent)
        self._everyone.assign(tf.zeros_like(self._everyone))
        raise stop_signals.exception(number)
