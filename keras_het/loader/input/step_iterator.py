"""The iterator Keras steps through, and its stand-in inside a `tf.function`."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from keras_het import private_api
from keras_het.ignored_errors import ignore_errors
from keras_het.loader.input.data_pass import DataPass
from keras_het.loader.nested import Batch, Spec, StepInput
from keras_het.planning.shares import IntArray

if TYPE_CHECKING:
    from keras_het.loader.input.distributed_steps import DistributedSteps

State = TypeVar("State")
_END = "End of the data."
_numbers = itertools.count(1)
_inputs: weakref.WeakValueDictionary[int, Traced] = weakref.WeakValueDictionary()


def number_of(source: Traced) -> int:
    """Return the number by which a graph finds a dataset or an iterator while that exists."""
    if source.graph_number is None:
        source.graph_number = next(_numbers)
        _inputs[source.graph_number] = source
    return source.graph_number


class InputSpec(tf.TypeSpec):
    """The type of a distributed dataset or iterator: a function is traced once per type."""

    __slots__ = ["_element_spec", "_is_iterator"]

    def __init__(self, element_spec: Spec, is_iterator: bool) -> None:
        self._element_spec, self._is_iterator = element_spec, is_iterator

    @property
    def value_type(self) -> type[_InGraph]:
        return GraphIterator if self._is_iterator else GraphDataset

    def _serialize(self) -> tuple[Any, ...]:
        return (self._element_spec, self._is_iterator)

    @property
    def _component_specs(self) -> tf.TensorSpec:
        return tf.TensorSpec([], tf.int64)

    def _to_components(self, value: DistributedSteps | StepIterator | _InGraph) -> tf.Tensor:
        if isinstance(value, _InGraph):
            return value.number
        return tf.constant(number_of(value), tf.int64)

    def _from_components(self, components: tf.Tensor) -> _InGraph:
        return self.value_type(components, self._element_spec)


class Traced:
    """Base of what a `tf.function` takes by its `InputSpec`."""

    _is_iterator: bool
    _element_spec: Spec
    graph_number: int | None = None

    @property
    def element_spec(self) -> Spec:
        """The type of the elements, for example for the `input_signature` of a `tf.function`.

        The number of rows is None.
        """
        return self._element_spec

    @property
    def _type_spec(self) -> InputSpec:
        return InputSpec(self.element_spec, is_iterator=self._is_iterator)

    def __tf_tracing_type__(self, context: object) -> InputSpec:
        del context
        return self._type_spec

    def _in_graph(self) -> Any:
        return self._type_spec._from_components(tf.constant(number_of(self), tf.int64))


class _InGraph(Traced):
    """Stand-in for a distributed dataset or its iterator in a graph."""

    def __init__(self, number: tf.Tensor, element_spec: Spec) -> None:
        self.number, self._element_spec = number, element_spec


class GraphIterator(_InGraph, tf.distribute.DistributedIterator, private_api.CompositeTensor):
    """An iterator in a graph."""

    _is_iterator = True

    def __iter__(self) -> GraphIterator:
        return self

    def __next__(self) -> StepInput:
        return self.get_next()

    def get_next(self) -> StepInput:
        """The next element; `OutOfRangeError` at the end, when the graph runs."""
        return self._fetch(may_end=False)[1]

    def get_next_as_optional(self) -> tf.experimental.Optional:
        has_value, element = self._fetch(may_end=True)
        return tf.cond(
            has_value,
            lambda: tf.experimental.Optional.from_value(element),
            lambda: tf.experimental.Optional.empty(self._element_spec),
        )

    def _fetch(self, may_end: bool) -> tuple[tf.Tensor, StepInput]:
        specs = tf.nest.flatten(self._element_spec, expand_composites=True)
        present = [spec for spec in specs if spec is not None]

        def fetch(number: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            try:
                element = next(_find(number))
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                if not may_end:
                    raise StopIteration(_END) from error  # OutOfRangeError in the graph
                empty = [tf.zeros([n or 0 for n in s.shape], s.dtype) for s in present]
                return [tf.constant(False), *empty]
            leaves = tf.nest.flatten(element, expand_composites=True)
            return [tf.constant(True), *(leaf for leaf in leaves if leaf is not None)]

        dtypes = [tf.bool, *(spec.dtype for spec in present)]
        with tf.device("CPU:0"):
            has_value, *fetched = tf.py_function(fetch, [self.number, _turns()], dtypes)
        has_value.set_shape([])
        for tensor, spec in zip(fetched, present, strict=True):
            tensor.set_shape(spec.shape)
        tensors = iter(fetched)
        leaves = [None if spec is None else next(tensors) for spec in specs]
        element = tf.nest.pack_sequence_as(self._element_spec, leaves, expand_composites=True)
        return has_value, element


class GraphDataset(_InGraph, tf.distribute.DistributedDataset, private_api.CompositeTensor):
    """A distributed dataset in a graph."""

    _is_iterator = False

    def __iter__(self) -> GraphIterator:
        held: list[
            StepIterator | GraphIterator
        ] = []  # one for each place in a graph, until it opens the next

        def open_pass(number: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            held[:] = [iter(_find(number))]
            return tf.constant(number_of(held[0]), tf.int64)

        with tf.device("CPU:0"):
            number = tf.py_function(open_pass, [self.number, _turns()], tf.int64)
        number.set_shape([])
        return GraphIterator(number, self._element_spec)

    def reduce(
        self, initial_state: State, reduce_func: Callable[[State, StepInput], State]
    ) -> State:
        """Fold a function over all elements; AutoGraph turns `for batch in data_set` into this."""
        iterator = iter(self)

        def body(
            state: State, optional: tf.experimental.Optional
        ) -> tuple[State, tf.experimental.Optional]:
            state = reduce_func(state, optional.get_value())
            return state, iterator.get_next_as_optional()

        state, _ = tf.while_loop(
            lambda state, optional: optional.has_value(),
            body,
            (initial_state, iterator.get_next_as_optional()),
            parallel_iterations=1,
        )
        return state


@functools.cache
def _turns() -> tf.Tensor:
    """Return a resource that every fetch takes, so that fetches have the program's order."""
    # TensorFlow keeps that order between operations with a common resource. Without one, the first
    # step of a loop may be fetched while the loop before it runs.
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.MutexV2(shared_name="keras_het_fetches")


def _find(number: tf.Tensor) -> Any:
    source = _inputs.get(int(number))
    if source is None:
        raise RuntimeError(
            "The dataset or iterator that this function was given no longer exists. Keep a "
            "reference to it while the function runs."
        )
    return source


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
