"""Functions of a partition that transfer its version and rule state to another process."""

from __future__ import annotations

import tensorflow as tf

from keras_het.asynchronous.parameter_service.part import Part
from keras_het.rpc.admission import Status
from keras_het.rpc.served_function import TfFunction, answer_if

_PLACE = (tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int64))


def export_function(part: Part) -> TfFunction:
    """Return a function that answers with variable sizes and a piece of one variable."""
    sizes = part.state_sizes

    @tf.function(input_signature=_PLACE, autograph=False)
    def export(place: tf.Tensor, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        known = (place >= 0) & (place < len(sizes)) & (start >= 0)
        return answer_if(
            known,
            lambda: (
                tf.constant(int(Status.OK)),
                tf.constant(sizes, tf.int64),
                part.state_piece(place, start),
            ),
        )

    return export


def set_state_function(part: Part) -> TfFunction:
    """Return a function that accepts a piece of a variable of an equally sized partition."""
    sizes = part.state_sizes
    signature = [
        tf.TensorSpec([None], tf.int64),
        *_PLACE,
        tf.TensorSpec([], tf.string),
    ]

    def fits(saved_sizes: tf.Tensor) -> tf.Tensor:
        is_same_rule = tf.equal(tf.size(saved_sizes), len(sizes))
        return tf.cond(
            is_same_rule,
            lambda: tf.reduce_all(tf.equal(saved_sizes, sizes)),
            lambda: tf.constant(False),
        )

    @tf.function(input_signature=signature, autograph=False)
    def set_state(
        saved_sizes: tf.Tensor, place: tf.Tensor, start: tf.Tensor, piece: tf.Tensor
    ) -> tf.Tensor:
        def take() -> tf.Tensor:
            # Two pieces of a variable are in flight at a time.
            taken = part.lock.execute(lambda: part.set_state_piece(place, start, piece))
            return tf.where(taken, int(Status.OK), int(Status.NOT_FINITE))

        known = (place >= 0) & (place < len(sizes)) & (start >= 0) & fits(saved_sizes)
        return answer_if(known, take)

    return set_state
