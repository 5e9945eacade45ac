"""The iterator Keras steps through: it counts, times, and ends the way Keras needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_het import private_api
from keras_het.ignored_errors import ignore_errors
from keras_het.loader.input.data_pass import DataPass
from keras_het.loader.input.in_graph import GraphIterator, Traced
from keras_het.loader.nested import Batch, StepInput
from keras_het.planning.shares import IntArray

if TYPE_CHECKING:
    from keras_het.loader.input.distributed_steps import DistributedSteps

Wrap = Callable[[list[Batch], IntArray], StepInput]
"""Makes the training step's input from the local batches and all sizes."""


class StepIterator(Traced, private_api.IteratorInterface):
    """Iterator over one epoch in Python, one element per step; also in a graph.

    Keras runs `for step, data in zip(range(steps_per_execution), iterator)` for an iterator that is
    not one of TensorFlow's: it calls `iter()` on it at the start of each execution. An execution
    that got nothing must end with `OutOfRangeError` (after StopIteration Keras would continue with
    a result it does not have), one that got something must end with StopIteration so that Keras
    reports what it has. A loop over a whole pass ends as with any iterator. A loop that calls
    `iter()` again on an exhausted iterator looks like an execution, and gets `OutOfRangeError`.

    Args:
        open_run: starts the pass, called at the first step.
        drop_run: takes back a pass that is no longer iterated.
        wrap: makes an element from the local batches and the sizes of all replicas.
        source: the dataset of which this is a pass.

    Attributes:
        step: completed steps of this epoch, including those skipped by a resume.
        samples: rows of global batches that this iterator delivered, over all replicas.
        input_wait_seconds: time that the last step waited for its element.
    """

    _is_iterator = True

    def __init__(
        self,
        open_run: Callable[[], DataPass],
        drop_run: Callable[[DataPass], None],
        wrap: Wrap,
        source: DistributedSteps,
    ) -> None:
        self.source = source
        self._element_spec = source.element_spec
        self._open_run = open_run
        self._drop_run = drop_run
        self._wrap = wrap
        self._run: DataPass | None = None
        self._first_of_execution = False
        self._delivered = 0
        self._has_ended = False
        self.samples = 0
        self.input_wait_seconds = 0.0

    @property
    def step(self) -> int:
        """Completed steps of this epoch."""
        return self._delivered + (self._run.first_step if self._run else 0)

    @property
    def pass_number(self) -> int | None:
        """Number of iterators made from the data before this one, None before the first step."""
        return self._run.number if self._run else None

    @property
    def fingerprint(self) -> int | None:
        """Hash of the first global batch, as in `DistributedSteps.fingerprint`."""
        return self._run.fingerprint if self._run else None

    def get_next(self) -> StepInput:
        """Return the next element, like `next`, or raise `OutOfRangeError`."""
        if not tf.executing_eagerly():
            return self._in_graph().get_next()
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Return the next element as a `tf.experimental.Optional`, empty at the end."""
        if not tf.executing_eagerly():
            return self._in_graph().get_next_as_optional()
        try:
            return tf.experimental.Optional.from_value(self.get_next())
        except tf.errors.OutOfRangeError:
            return tf.experimental.Optional.empty(self.element_spec)

    def __iter__(self) -> StepIterator | GraphIterator:
        if not tf.executing_eagerly():
            return self._in_graph()
        self._first_of_execution = True
        return self

    def __next__(self) -> StepInput:
        if not tf.executing_eagerly():
            return self.get_next()
        start = time.perf_counter()
        if hasattr(self._wrap, "wait_begins"):
            self._wrap.wait_begins()
        if self._run is None:
            self._run = self._open_run()
        self._run.was_executed |= self._first_of_execution
        # a graph fetches from the host
        is_in_graph = self.graph_number is not None or self.source.graph_number is not None
        self._run.placement = None if is_in_graph else getattr(self._wrap, "placement", None)
        try:
            batches, sizes = self._run.next_element()
        except StopIteration:
            self._tell_end()
            if self._first_of_execution:
                raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None
            raise
        self.input_wait_seconds = time.perf_counter() - start
        self.source.input_wait_seconds = self.input_wait_seconds
        self._first_of_execution = False
        self._delivered += 1
        self.samples += int(sizes.sum())
        return self._wrap(batches, sizes)

    def _tell_end(self) -> None:
        """Let the workers compare where the data ended, once, if unknown before."""
        steps, self._has_ended = (-1 if self._has_ended else self.step), True
        if steps >= 0 and hasattr(self._wrap, "at_end"):
            self._wrap.at_end(steps)

    def close(self) -> None:
        """End this epoch early and free its pipeline."""
        if self._run is not None:
            self._run.close()

    def __del__(self) -> None:
        with ignore_errors("dropping an epoch"):
            if self._run is not None:
                self._drop_run(self._run)
