"""The last finished step, which can be saved while the next one waits for something."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.session import Batches, StepFunction
from keras_het.value_types import Nest

_COMPUTES, _UPDATES = 1.0, 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
_Position: TypeAlias = Mapping[str, Any]
_Stored: TypeAlias = dict[int, tuple[keras.Variable, tf.Tensor]]
"""Variables, and the handles of what their values were, by id of the variable."""


class UnfinishedStep:
    """How far the running train step of this worker's first replica has come.

    While a step waits in its collective, weights and optimizer are those of the step before, but
    seeds and moving statistics have advanced. The step therefore stores their values first, in its
    graph, and waits for no device. Another thread may read the whole until the update begins.
    """

    def __init__(self, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self._phase = tf.Variable(0.0, trainable=False)
        self._is_known = True
        self._stored: weakref.WeakKeyDictionary[keras.Model, _Stored] = weakref.WeakKeyDictionary()

    @property
    def is_before_update(self) -> bool:
        """Whether the running step has stored what it changes, and updates no weight yet."""
        phase = tf.raw_ops.ReadVariableOp(resource=self._phase.handle, dtype=tf.float32)
        return self._is_known and float(phase.numpy()) == _COMPUTES

    def values_before(self, model: keras.Model) -> AbstractContextManager[None]:
        """Let the variables of a model show their values before the running step."""
        return private_api.showing_values(
            [
                (variable, tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype))
                for variable, handle in self._stored.get(model, {}).values()
            ]
        )

    @contextmanager
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
            begun = self._set_phase(_COMPUTES)
        with tf.control_dependencies([begun]):
            yield

    def check(self, model: keras.Model, assigned: Iterable[int]) -> None:
        """Find out whether a step assigned only what was stored, given ids of variables."""
        self._is_known = self._is_known and set(assigned) <= self._stored.get(model, {}).keys()

    @contextmanager
    def updating(self, reduced: Iterable[tf.Tensor]) -> Iterator[None]:
        """Let the update wait until all gradients are reduced; in the graph."""
        with tf.control_dependencies(tf.nest.flatten(list(reduced), expand_composites=True)):
            begun = self._set_phase(_UPDATES)
        with tf.control_dependencies([begun]):
            yield

    def _set_phase(self, phase: float) -> tf.Operation:
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
        save: Callable[[_Position, Callable[[], bool]], bool],
        unfinished: UnfinishedStep,
    ) -> None:
        self.num_trained = 0
        self._model, self._mark, self._save = model, mark, save
        self._unfinished = unfinished
        self._changing = threading.Lock()  # held while a step may change the model
        self._num_drawn = 0
        self._is_in_step = self._is_waiting = self._has_failed = False
        self._position = mark()

    def run_step(self, function: StepFunction, batches: Batches) -> Nest:
        """Run a step; the outermost layer around it."""
        self._changing.acquire()
        self._position, self._is_in_step, self._has_failed = self._mark(), True, False
        try:
            result = function(batches)
            self.num_trained = self._num_drawn
        except BaseException:
            self._has_failed = not self._is_waiting
            raise
        finally:
            if not self._is_waiting:
                self._changing.release()
            self._is_in_step = self._is_waiting = False
        return result

    def wait_for_batch(self) -> None:
        """Note that the step waits for its batch, or that an execution has finished a step."""
        if self._is_in_step:
            if self.num_trained < self._num_drawn:
                self.num_trained = self._num_drawn
                self._position = self._mark()
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
        while True:
            has_state = self._changing.acquire(timeout=_SECONDS_BETWEEN_LOOKS)
            if has_state and not self._has_failed:
                position = self._position if self._is_in_step else self._mark()
                return self._save(position, lambda: True)
            if self._unfinished.is_before_update:
                with self._unfinished.values_before(self._model):
                    if self._save(self._position, lambda: self._unfinished.is_before_update):
                        return True
            if has_state or time.monotonic() > deadline:
                return False
