"""Executions of Keras: several steps in one call, for which Python draws the batches first.

Keras runs the steps of an execution one by one from Python if their iterator is not TensorFlow's.
Ours is not: it cuts shares and times waits in Python, which costs less than a start of the graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

from keras_het.fit.session import Batches, StepFunction
from keras_het.strategy.batches.uneven_per_replica import UnevenPerReplica, UnevenPerReplicaSpec
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.data_path import DataPath

_Types: TypeAlias = tuple[UnevenPerReplicaSpec, ...]
"""Types of what is present in a batch."""


# Batches travel as a vector of Optionals, one a step: none is copied, and neither their number nor
# their sizes are a reason to trace again.
class Execution:
    """A train or test function of Keras that runs all steps of an execution in one call."""

    def __init__(self, data_path: DataPath, model: keras.Model, function: StepFunction) -> None:
        self._data_path, self._model, self._function = data_path, model, function
        # by the structure of a batch, and by its types
        self._traced: dict[str, dict[_Types, Any]] = {}

    def __call__(self, batches: Batches) -> Nest:
        number = self._model.steps_per_execution
        is_of_tensorflow = isinstance(
            batches, (tf.data.Iterator, tf.distribute.DistributedIterator)
        )
        if number == 1 or self._model.run_eagerly or is_of_tensorflow:
            return self._function(batches)
        with self._data_path.drawing_together():
            drawn = list(itertools.islice(iter(batches), number))
        leaves = [tf.nest.flatten(batch) for batch in drawn]
        if (types := _types_of(leaves)) is None:
            return self._function(iter(drawn))
        with tf.device("CPU:0"):
            steps = [tf.raw_ops.OptionalFromValue(components=_tensors(each)) for each in leaves]
            steps = tf.raw_ops.Pack(values=steps)
        return self._function_for(drawn[0], types)(steps)

    def _function_for(self, batch: Nest, types: _Types) -> Any:
        """Return a function for batches of this structure and these types, or wider ones."""
        known = self._traced.setdefault(str(tf.nest.map_structure(type, batch)), {})
        if types not in known:
            wider = next((each for each in reversed(known) if _is_subtype(types, each)), None)
            if wider is None:  # a second shape makes a trace for all, as `reduce_retracing` does
                wider = _common([types, *list(known)[-1:]]) or types
                known[wider] = tf.function(
                    functools.partial(self._run, _batch_type(batch, wider)),
                    input_signature=[tf.TensorSpec([None], tf.variant)],
                    autograph=False,
                )
            known[types] = known[wider]
        return known[types]

    def _run(self, batch_type: Nest, steps: tf.Tensor) -> Nest:
        """Run the steps in a loop, and return what the last one returns; in the graph."""
        specs = tf.nest.flatten(batch_type, expand_composites=True)
        results: list[Nest] = []
        with tf.device("CPU:0"):
            number = tf.shape(steps)[0]

        def run_step(step: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device("CPU:0"):
                tensors = iter(_values(steps[step], [spec for spec in specs if spec is not None]))
            parts = [None if spec is None else next(tensors) for spec in specs]
            batch = tf.nest.pack_sequence_as(batch_type, parts, expand_composites=True)
            results[:] = [step, self._function(iter([batch]))]
            return step + 1, tf.raw_ops.OptionalFromValue(components=_tensors(results))

        _, latest = tf.while_loop(
            lambda step, _: step < number,
            run_step,
            (tf.constant(0), tf.raw_ops.OptionalNone()),
            parallel_iterations=1,
        )
        values = iter(_values(latest, _tensors(results)))
        results = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else next(values), results, expand_composites=True
        )
        return results[1]


def _types_of(batches: Sequence[Sequence[Any]]) -> _Types | None:
    """Return types that all batches have, given their leaves; None if there are no such."""
    forms = {tuple([type(leaf) for leaf in leaves]) for leaves in batches}
    if len(forms) != 1 or set(*forms) - {type(None)} != {UnevenPerReplica}:
        return None
    types = {tuple([leaf._type_spec for leaf in leaves if leaf is not None]) for leaves in batches}
    return _common(list(types))


def _common(each: Sequence[_Types]) -> _Types | None:
    if len(each) == 1:
        return each[0]
    common = [
        first.most_specific_common_supertype(others) for first, *others in zip(*each, strict=True)
    ]
    return None if None in common else tuple(common)


def _is_subtype(types: _Types, others: _Types) -> bool:
    return all(one.is_subtype_of(other) for one, other in zip(types, others, strict=True))


def _batch_type(batch: Nest, types: _Types) -> Nest:
    present = iter(types)
    return tf.nest.map_structure(lambda leaf: leaf if leaf is None else next(present), batch)


def _tensors(structure: Nest) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None]


def _values(optional: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
    types, shapes = [each.dtype for each in like], [each.shape for each in like]
    return tf.raw_ops.OptionalGetValue(optional=optional, output_types=types, output_shapes=shapes)
