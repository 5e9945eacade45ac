"""The one way into a served function: shapes and credential first, then anything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_het.rpc.admission import Status
from keras_het.rpc.gate import Gate

_TOKEN = tf.TensorSpec([], tf.string)


def served_function(
    name: str, function: Any, gate: Gate, refused: Callable[[], Any] | None = None
) -> Any:
    """The function as strangers may call it: nothing of a request is used before it is admitted.

    TensorFlow checks number and types of the arguments, and trusts their shapes. Here they are
    unknown to the graph, whose optimizer would drop a check that holds by declaration.

    Args:
        name: that clients call it by.
        function: `tf.function` with an input signature of known ranks. It returns an `int32`
            status, or a tuple that begins with one.
        gate: who is let in.
        refused: gives the status for everybody else, int32 scalar; `Status.REFUSED` by default.

    Returns:
        A `tf.function` that takes the caller's token before the other arguments. Where it refuses,
        what follows the status is zeros, or empty.
    """
    specs = [_TOKEN, *function.input_signature]

    @tf.function(input_signature=[tf.TensorSpec(None, s.dtype) for s in specs], autograph=False)
    def serve(*arguments: Any) -> Any:
        outputs: Any = None

        def run() -> Any:
            nonlocal outputs
            pairs = zip(arguments[1:], specs[1:], strict=True)
            # in this graph, not as a graph of its own, whose calls cost time
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


def hello_function() -> Any:
    """Says that whoever calls it is let in."""

    @tf.function(input_signature=[], autograph=False)
    def hello() -> Any:
        return tf.constant(int(Status.OK))

    return hello


def refusal(outputs: Any, status: Callable[[], Any] | None = None) -> Any:
    """What is answered in the place of a function's outputs: a status, and zeros or nothing.

    Args:
        outputs: the function's, a status first.
        status: gives the status, int32 scalar; `Status.REFUSED` by default.
    """
    empty = [
        tf.zeros([0] if out.shape.rank is None else [size or 0 for size in out.shape], out.dtype)
        for out in tf.nest.flatten(outputs)[1:]
    ]
    first = tf.constant(int(Status.REFUSED)) if status is None else status()
    return tf.nest.pack_sequence_as(outputs, [first, *empty])


def _have_shapes(tensors: Sequence[Any], specs: Sequence[Any]) -> Any:
    ranks = [spec.shape.rank for spec in specs]
    hold = tf.reduce_all(tf.equal(tf.stack([tf.rank(given) for given in tensors]), ranks))
    for given, spec in zip(tensors, specs, strict=True):
        expected = [-1 if size is None else size for size in spec.shape]
        if set(expected) - {-1}:
            # as many numbers as are expected, whatever the rank is
            unknown = tf.fill([len(expected)], tf.constant(-1, tf.int64))
            sizes = tf.concat([tf.shape(given, tf.int64), unknown], axis=0)[: len(expected)]
            is_free = tf.equal(expected, -1)
            hold &= tf.reduce_all(is_free | tf.equal(sizes, tf.constant(expected, tf.int64)))
    return hold
