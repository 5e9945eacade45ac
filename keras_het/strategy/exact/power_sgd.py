r"""PowerSGD: gradients travel between workers as matrices of low rank; the rest is sent later.

A gradient of two or more dimensions is a matrix whose columns are its last dimension, or the
transpose, so that its columns are the shorter ones. To the sum over its replicas, worker w adds
what it has not sent yet, :math:`M_w = g_w + e_w`. With a matrix Q of r columns of the step before,

.. math:: P = \operatorname{orth}\Big(\sum_w M_w Q\Big), \quad
          Q_w = M_w^T P, \quad Q' = \sum_w Q_w, \quad
          g = P Q'^T, \quad e'_w = M_w - P Q_w^T .

Nothing is lost: :math:`\sum_w M_w = g + \sum_w e'_w`. PyTorch subtracts the workers' mean instead,
:math:`g / W`. That has the same sum, but what a worker's gradient differs from the mean would add
up in its error step by step, and with unequal shares it always differs.

Weights have to be equal bit by bit on devices of different kinds, which round differently in
products of matrices and in the orthonormalization. So all take the chief's P, which travels with
Q', and multiply columns one by one. Q has columns of maximum 1: neither it nor P depends on the
size of gradients, so that a loss scale may be large, and may change.

Reference: Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization", NeurIPS 2019.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.step import ReplicaSum, StepSpec
from keras_het.value_types import EitherVariable, Summand


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What this worker keeps of a variable's gradients from step to step."""

    variable: EitherVariable
    """Kept alive, as it is found by its id."""
    basis: tf.Variable
    """Q, equal on all workers."""
    error: tf.Variable
    """Of this worker, as a matrix, and of the gradient without loss scale."""


class PowerSGD:
    """What a worker keeps of the gradients of its models, on its first device."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self._device = rank, device
        # neither a model's nor an optimizer's weights, and of all functions traced for a model
        self._kept = weakref.WeakKeyDictionary[keras.Model, dict[int, _Kept]]()

    def pays(self, gradient: Summand) -> bool:
        """Tell whether a gradient becomes at most half as long."""
        if not isinstance(gradient, tf.Tensor) or gradient.dtype not in (tf.float32, tf.float64):
            return False
        if gradient.shape.rank < 2 or not gradient.shape.num_elements():
            return False
        short, long = sorted(_sides(gradient))
        return 2 * self.rank * (2 * short + long) < short * long

    def kept(self, model: keras.Model, variable: EitherVariable, gradient: tf.Tensor) -> _Kept:
        """Return what is kept of a variable's gradients, nothing sent yet in the first step."""
        of_model = self._kept.setdefault(model, {})
        if id(variable) not in of_model:
            sides = _sides(gradient)
            random = np.random.default_rng(sides).normal(size=(max(sides), self.rank))
            with tf.init_scope(), tf.device(self._device):  # TensorFlow's, not the strategy's
                values = tf.constant(random, gradient.dtype), tf.zeros(sides, gradient.dtype)
                made = [private_api.ResourceVariable(value, trainable=False) for value in values]
            of_model[id(variable)] = _Kept(variable, *made)
        return of_model[id(variable)]


@dataclasses.dataclass(frozen=True)
class Approximation:
    """Sums over all replicas, and what this worker keeps afterwards."""

    sums: list[tf.Tensor]
    _is_finite: tf.Tensor
    _to_keep: list[tuple[tf.Variable, tf.Tensor]]

    def keep(self, others: Sequence[Summand]) -> None:
        """Keep what is left, unless a sum is not finite: a loss scale then skips the step."""
        flat = [each.values if isinstance(each, tf.IndexedSlices) else each for each in others]
        may_keep = self._is_finite & _are_finite([each for each in flat if each.dtype.is_floating])
        for variable, value in self._to_keep:
            value = tf.where(may_keep & tf.math.is_finite(value), value, variable.read_value())
            # not `assign`, which hooks take for an assignment of a layer
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def approximated(
    gradients: Sequence[tf.Tensor],
    kept: Sequence[_Kept],
    scales: Sequence[tf.Tensor | None],
    spec: StepSpec,
    replica_sum: ReplicaSum,
) -> Approximation:
    """Sum gradients over all replicas, in two sums of matrices of few columns."""
    own = replica_sum.within_worker(gradients)
    rank = kept[0].basis.shape[1]
    # the first replica speaks for its worker; to P, once it is the same for all, only the chief
    speaks, is_chief = spec.local_position == 0, spec.replica_id == 0
    columns = no_columns = [tf.zeros([min(_sides(each)), rank], each.dtype) for each in own]
    own_bases = [tf.zeros([max(_sides(each)), rank], each.dtype) for each in own]
    if speaks:
        matrices = [_with_error(*each) for each in zip(own, kept, scales, strict=True)]
        bases = [each.basis.read_value() for each in kept]
        columns = [
            tf.matmul(matrix, basis, transpose_a=_is_tall(matrix))
            for matrix, basis in zip(matrices, bases, strict=True)
        ]
    columns = replica_sum(columns)
    is_finite = _are_finite(columns)
    if speaks:
        columns = [tf.where(is_finite, _scaled(each, 0.0), tf.zeros_like(each)) for each in columns]
        columns = [tf.linalg.qr(each)[0] for each in columns]
        own_bases = [
            tf.matmul(matrix, each, transpose_a=not _is_tall(matrix))
            for matrix, each in zip(matrices, columns, strict=True)
        ]
    columns, new_bases = replica_sum((columns if is_chief else no_columns, own_bases))
    # so that no sum of their products is infinite either
    is_finite &= _are_finite([*columns, *[rank * each for each in new_bases]])
    columns = [tf.where(is_finite, each, np.nan) for each in columns]
    sums = [_product(*each) for each in zip(columns, new_bases, own, strict=True)]
    if not speaks:
        return Approximation(sums, is_finite, [])
    scaled = [_scaled(*each) for each in zip(new_bases, bases, strict=True)]
    to_keep = [(each.basis, basis) for each, basis in zip(kept, scaled, strict=True)]
    for matrix, p, q, each, scale in zip(matrices, columns, own_bases, kept, scales, strict=True):
        error = matrix - _product(p, q, matrix)
        to_keep.append((each.error, error if scale is None else error / scale))
    return Approximation(sums, is_finite, to_keep)


def _with_error(gradient: tf.Tensor, kept: _Kept, scale: tf.Tensor | None) -> tf.Tensor:
    """Return M: the gradient as a matrix, and what its worker has not sent yet."""
    error = kept.error.read_value()
    return tf.reshape(gradient, error.shape) + (error if scale is None else error * scale)


def _sides(gradient: tf.Tensor) -> list[int]:
    """Rows and columns of a gradient as a matrix; the last dimension of a kernel is its output."""
    last = int(gradient.shape[-1])
    return [gradient.shape.num_elements() // last, last]


def _is_tall(gradient: tf.Tensor) -> bool:
    rows, columns = _sides(gradient)
    return rows > columns


def _product(columns: tf.Tensor, basis: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return P Q^T or its transpose, rounded alike on all devices, in the shape of a gradient."""
    factors = (basis, columns) if _is_tall(like) else (columns, basis)
    left, right = (tf.unstack(each, axis=1) for each in factors)
    parts = [one[:, None] * other for one, other in zip(left, right, strict=True)]
    return tf.reshape(tf.add_n(parts), like.shape)


def _scaled(matrix: tf.Tensor, otherwise: tf.Tensor | float) -> tf.Tensor:
    """Scale columns to the maximum 1; replace columns of zeros, which would never find anything."""
    largest = tf.reduce_max(tf.abs(matrix), axis=0)
    return tf.where(largest > 0, tf.math.divide_no_nan(matrix, largest), otherwise)


def _are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in tensors] or [True])
