"""Stop of training at a step boundary, the same one on all workers, or in a step that waits."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.session import STEP_FUNCTIONS, Batches, FitSession, Rank, StepFunction
from keras_het.strategy.cluster.stop_signals import SIGNALS, call_for, stop_signals
from keras_het.strategy.measure.emulated_device import until_computed
from keras_het.strategy.measure.late_reads import LAG, LateReads, Read
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy
    from keras_het.strategy.measure.sampled_steps import SampledSteps

_logger = logging.getLogger(__name__)

_SECONDS_TO_MEET = 2.0
# a signal of each kind, to measure closely, and an interval between measured steps
_NUM_FLAGS = len(SIGNALS) + 2
_UPDATES = 0.5
_COUNTED = 2.0**20  # float32 holds halves of it
_SECONDS_BETWEEN_LOOKS = 0.05
_Position: TypeAlias = Mapping[str, Any]
_Stored: TypeAlias = dict[int, tuple[keras.Variable, tf.Tensor]]
"""Variables, and the handles of what their values were, by id of the variable."""


# A worker that stopped by itself would leave the others in a collective: its request travels in the
# collective of the next step, after which, or a few steps later, all stop.
class StopRequest:
    """The stop this process was asked for, and what all workers have agreed on."""

    def __init__(self, strategy: HeterogeneousStrategy, is_alone: bool) -> None:
        # the strategy holds this, and is to be freed with its last reference
        self._strategy, self._is_alone = weakref.ref(strategy), is_alone
        device = strategy.extended.worker_devices[0]
        self.unfinished = UnfinishedStep(device)
        self.guard: StepGuard | None = None
        self.tell: Callable[[], None] = lambda: None
        self._hurry = threading.Lock()  # held from the moment when it hurries
        self._was_saved = threading.Event()
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
        stops_at_boundaries = self.guard is not None or not self._is_alone
        is_in_steps = self._depth > 0 and self._has_begun_steps and stops_at_boundaries
        return is_in_steps and not self._was_saved.is_set()

    def ask(self, number: int) -> None:
        """Request a stop at the next step boundary; called in a signal handler."""
        self._received = number

    def guard_steps(
        self, session: FitSession, mark: Callable[[], Any], save: Callable[[Any, Any, bool], bool]
    ) -> StepGuard:
        """Have the last finished step of a `fit` saved if the process must end in the next one."""
        self.guard = guard = StepGuard(session.model, mark, save, self.unfinished)
        session.add_layer(Rank.GUARD_STATE, guard.run_step)
        session.add_layer(Rank.END_IF_ASKED, functools.partial(self._run_step, session))
        session.on_end(lambda: setattr(self, "guard", None))
        return guard

    def end_now(self, number: int, deadline: float) -> None:
        """Save the last finished step, and let the process end in the running one."""
        if not self._hurry.acquire(blocking=False):
            return
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

    def watch(self, session: FitSession) -> None:
        """Let a loop of Keras end between two steps; of a lone process only if they are guarded."""
        if not self._is_alone:
            session.add_layer(Rank.END_IF_ASKED, functools.partial(self._run_step, session))

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
            if self._depth > 1 or (self._received is None and not self._hurry.locked()):
                raise
            # most likely because the same signal ended another worker
            _logger.warning("Ends by a signal, after %s: %s", type(error).__name__, error)
        finally:
            if self._hurry.locked():
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
        is_together = self._agreed is not None and self._is_carried and not self._hurry.locked()
        if is_together and (strategy := self._strategy()) is not None:
            # The first worker to leave would break the step that others still finish.
            call_for(_SECONDS_TO_MEET, strategy.barrier)
        self._received = self._agreed = None
        self._reads.clear()
        self._sent = [0.0] * _NUM_FLAGS
        self._own.assign(self._sent)
        self._everyone.assign(tf.zeros_like(self._everyone))
        raise stop_signals.exception(number)


# While a step waits in its collective, weights and optimizer still belong to the step before, but
# seeds and moving statistics have advanced: the step stores these first, and another thread may
# read the whole until the update begins.
class UnfinishedStep:
    """How far the running train step of this worker's first replica has come."""

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            # the number of the step that runs in this execution, and a half when it updates
            self._phase = tf.Variable(0.0, trainable=False)
        self._is_known = True
        self._stored: weakref.WeakKeyDictionary[keras.Model, _Stored] = weakref.WeakKeyDictionary()

    def begin_execution(self) -> None:
        """Count steps from here; a device would stop for that in each execution of one step."""
        tf.raw_ops.AssignVariableOp(resource=self._phase.handle, value=np.float32(0))

    @property
    def num_before(self) -> int | None:
        """Number of steps that the running execution has finished, if their state is to be had."""
        # to be had if the step after them has stored what it changes, and updates no weight yet
        phase = float(self._read_phase().numpy())
        return int(phase) - 1 if self._is_known and phase >= 1 and phase.is_integer() else None

    def values_before(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Let the variables of a model show their values before the running step."""
        return private_api.showing_values(
            [
                (variable, tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype))
                for variable, handle in self._stored.get(model, {}).values()
            ]
        )

    @contextlib.contextmanager
    def computing(self, model: keras.Model) -> Iterator[None]:
        """Store the state of a model before the operations of its step; in the graph."""
        own = {
            id(variable)
            for layer in private_api.layers_with_state(model)
            for variable in private_api.own_state(layer)
        }
        handles = self._stored.setdefault(model, {})
        stored = [
            self._store(variable, handles)
            for variable in model.non_trainable_variables
            if id(variable) in own or "float" not in variable.dtype  # others are frozen weights
        ]
        with tf.control_dependencies(stored):
            # steps continue to be counted where nobody begins executions
            begun = self._set_phase(tf.math.floormod(tf.floor(self._read_phase()), _COUNTED) + 1)
        with tf.control_dependencies([begun]):
            yield

    def check(self, model: keras.Model, assigned: Iterable[int]) -> None:
        """Find out whether a step assigned only what was stored, given ids of variables."""
        self._is_known = self._is_known and set(assigned) <= self._stored.get(model, {}).keys()

    @contextlib.contextmanager
    def updating(self, reduced: Iterable[tf.Tensor]) -> Iterator[None]:
        """Let the update wait until all gradients are reduced; in the graph."""
        with tf.control_dependencies(tf.nest.flatten(list(reduced), expand_composites=True)):
            begun = self._set_phase(tf.floor(self._read_phase()) + _UPDATES)
        with tf.control_dependencies([begun]):
            yield

    def _read_phase(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._phase.handle, dtype=tf.float32)

    def _set_phase(self, phase: tf.Tensor) -> tf.Operation:
        # not `assign`, which counts as the step's own
        return tf.raw_ops.AssignVariableOp(resource=self._phase.handle, value=phase)

    def _store(self, variable: keras.Variable, stored: _Stored) -> tf.Operation:
        value = tf.convert_to_tensor(variable.value)
        if id(variable) not in stored:
            name = f"keras_het/before_step/{id(self)}/{id(variable)}"
            device = variable.value.device
            with tf.init_scope(), tf.device(device):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=value.dtype, shape=variable.shape, shared_name=name
                )
            stored[id(variable)] = variable, handle
        return tf.raw_ops.AssignVariableOp(resource=stored[id(variable)][1], value=value)


class StepGuard:
    """The steps of a `fit`, whose last finished one another thread can save at any time."""

    def __init__(
        self,
        model: keras.Model,
        mark: Callable[[], _Position],
        save: Callable[[_Position, Callable[[], bool], bool], bool],
        unfinished: UnfinishedStep,
    ) -> None:
        self.num_trained = 0
        self._model, self._mark, self._save = model, mark, save
        self._unfinished = unfinished
        self._changing = threading.Lock()  # held while a step may change the model
        self._num_drawn = 0
        self.is_in_step = self._is_waiting = self._has_failed = False
        # of the running execution: after each step that it may have finished
        self._positions = [mark()]

    @property
    def num_passes(self) -> int:
        """Number of passes over the data before the one that the latest step was taken from."""
        return len(self._positions[-1]["passes"])

    def run_step(self, function: StepFunction, batches: Batches) -> Nest:
        """Run a step; the outermost layer around it."""
        self._changing.acquire()
        self._positions, self.is_in_step, self._has_failed = [self._mark()], True, False
        if self._model.steps_per_execution > 1:
            self._unfinished.begin_execution()
        try:
            result = function(batches)
            self.num_trained = self._num_drawn
        except BaseException:
            self._has_failed = not self._is_waiting
            raise
        finally:
            if not self._is_waiting:
                self._changing.release()
            self.is_in_step = self._is_waiting = False
        return result

    def wait_for_batch(self, is_ahead: bool) -> None:
        """Note that the step waits for its batch, or that an execution has finished a step."""
        # not if the execution draws all batches before its first step (`is_ahead`)
        if self.is_in_step:
            if self.num_trained < self._num_drawn:
                self.num_trained = self._num_drawn
                self._positions = [*(self._positions if is_ahead else ()), self._mark()]
            self._is_waiting = True
            self._changing.release()

    def batch_arrives(self) -> None:
        """Note that the batch is here; called in the step."""
        if self._is_waiting:
            self._changing.acquire()
            self._is_waiting = False
            self._num_drawn += 1

    def save_last_step(self, deadline: float) -> bool:
        """Save the last finished step in another thread; no later one begins."""
        has_state = False
        while True:
            has_state = has_state or self._changing.acquire(timeout=_SECONDS_BETWEEN_LOOKS)
            if has_state and not self._has_failed:
                position = self._positions[0] if self.is_in_step else self._mark()
                if self._save(position, lambda: True, False):
                    return True
                time.sleep(_SECONDS_BETWEEN_LOOKS)  # callbacks have not waited for that
            elif self._save_finished_steps(self._unfinished.num_before):
                return True
            if self._has_failed or time.monotonic() > deadline:
                return False

    def _save_finished_steps(self, number: int | None) -> bool:
        """Save the state after so many steps of the running execution, if they are known."""
        if number is None:
            return False
        position = self._positions[min(number, len(self._positions) - 1)]
        with self._unfinished.values_before(self._model):
            return self._save(position, lambda: self._unfinished.num_before == number, True)
