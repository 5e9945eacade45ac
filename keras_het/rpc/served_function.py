"""The only entry to a served function: shapes and credential are checked before anything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_het.rpc.admission import Status
from keras_het.rpc.gate import Gate
from keras_het.value_types import Nest

TfFunction = tf.types.experimental.PolymorphicFunction
"""What `tf.function` returns."""
_TOKEN = tf.TensorSpec([], tf.string)


def served_function(
    name: str,
    function: tf.types.experimental.PolymorphicFunction,
    gate: Gate,
    refused: Callable[[], tf.Tensor] | None = None,
) -> tf.types.experimental.PolymorphicFunction:
    """Wrap a function for untrusted callers: no part of a request is used before admission.

    TensorFlow checks the number and types of the arguments but trusts their shapes. Here the shapes
    are unknown to the graph, because its optimizer would drop a check that holds by declaration.
    """
    specs = [_TOKEN, *function.input_signature]

    @tf.function(input_signature=[tf.TensorSpec(None, s.dtype) for s in specs], autograph=False)
    def serve(*arguments: tf.Tensor) -> Nest:
        outputs: Nest = None

        def run() -> Nest:
            nonlocal outputs
            pairs = zip(arguments[1:], specs[1:], strict=True)
            # In this graph: calls of a separate graph would cost time.
            given = [tf.ensure_shape(values, spec.shape) for values, spec in pairs]
            outputs = function.python_function(*given)
            return outputs

        text = tf.concat([tf.reshape(arguments[0], [-1]), [""]], axis=0)[0]
        return tf.cond(
            _have_shapes(arguments, specs) & gate.admits(text, name),
            run,
            lambda: refusal(outputs, refused),  # traced after the other branch
        )

    return serve


def hello_function() -> tf.types.experimental.PolymorphicFunction:
    """Return a function that tells its caller that it is admitted."""

    @tf.function(input_signature=[], autograph=False)
    def hello() -> tf.Tensor:
        return tf.constant(int(Status.OK))

    return hello


def refusal(outputs: Nest, status: Callable[[], tf.Tensor] | None = None) -> Nest:
    """Return a substitute for a function's outputs: a status, and zeros or empty tensors."""
    empty = [
        tf.zeros([0] if out.shape.rank is None else [size or 0 for size in out.shape], out.dtype)
        for out in tf.nest.flatten(outputs)[1:]
    ]
    first = tf.constant(int(Status.REFUSED)) if status is None else status()
    return tf.nest.pack_sequence_as(outputs, [first, *empty])


def answer_if(
    holds: tf.Tensor, run: Callable[[], Nest], otherwise: Status = Status.REFUSED
) -> Nest:
    """Return a function's outputs if a condition holds, else a status and zeros; in the graph."""
    outputs: Nest = None

    def note() -> Nest:
        nonlocal outputs
        outputs = run()
        return outputs

    return tf.cond(holds, note, lambda: refusal(outputs, lambda: tf.constant(int(otherwise))))


def _have_shapes(tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> tf.Tensor:
    ranks = [spec.shape.rank for spec in specs]
    hold = tf.reduce_all(tf.equal(tf.stack([tf.rank(given) for given in tensors]), ranks))
    for given, spec in zip(tensors, specs, strict=True):
        expected = [-1 if size is None else size for size in spec.shape]
        if set(expected) - {-1}:
            # As many numbers as expected, whatever the rank is.
            unknown = tf.fill([len(expected)], tf.constant(-1, tf.int64))
            sizes = tf.concat([tf.shape(given, tf.int64), unknown], axis=0)[: len(expected)]
            is_free = tf.equal(expected, -1)
            hold &= tf.reduce_all(is_free | tf.equal(sizes, tf.constant(expected, tf.int64)))
    return hold
