"""Whether replicas that must be equal still are, and what is done where they are not."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.fit.session import FitSession, Rank
from keras_het.planning.argument_checks import check_one_of
from keras_het.strategy.exact.own_state import variables_left_apart

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_WARNING = (
    "Replicas that must be equal differ after epoch %d: %s differs most, by %.1e of its largest "
    "value, between replica %d (worker %d) and replica %d; %d of %d variables differ. Unlike cards "
    "round differently, and such differences are small and grow slowly; a large one comes from "
    "something that trains or assigns on one replica only. "
    'HeterogeneousStrategy(on_drift="copy") makes all replicas equal at the end of each epoch, '
    'on_drift="ignore" compares nothing.'
)
_LEAST = float(np.finfo(np.float32).tiny)


def check_on_drift(on_drift: str) -> str:
    """Refuse what is no answer to replicas that differ."""
    check_one_of("on_drift", on_drift, ("warn", "copy", "ignore"))
    return on_drift


class DriftWatch(keras.callbacks.Callback):
    """Last callback of a `fit`: compares its replicas at the end of each epoch."""

    _has_warned = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        found = self._replica_values()
        everyone = self._meet([] if found is None else found.notes)
        if found is not None and found.differ(everyone):
            self._act(found, epoch + 1)

    def _meet(self, notes: Sequence[int]) -> np.ndarray:
        """Return the notes of all workers, which are this worker's own."""
        return np.array([notes])

    def _replica_values(self) -> ReplicaValues | None:
        strategy = self.model.distribute_strategy
        is_over = self._has_warned and strategy.extended.on_drift == "warn"
        if strategy.extended.on_drift == "ignore" or strategy._holds_parts or is_over:
            return None
        return ReplicaValues(self.model, strategy)

    def _act(self, found: ReplicaValues, epoch: int) -> None:
        strategy = self.model.distribute_strategy
        with strategy.extended.naming_lost_workers():
            values = found.values()
            if not self._has_warned:
                found.tell(found.differences(values), epoch)
        self._has_warned = True
        if strategy.extended.on_drift == "copy":
            found.assign(values)


# Weights, moving statistics, optimizer state. Seeds, metrics and what a step leaves apart on
# purpose are each replica's own; in local training workers differ, too.
class ReplicaValues:
    """What this worker's replicas hold of a model and must hold alike."""

    def __init__(self, model: keras.Model, strategy: HeterogeneousStrategy) -> None:
        session = FitSession.of(model)
        is_local = session is not None and session.has_layer(Rank.REDUCE_LOCALLY)
        self._strategy, self._is_alone = strategy, is_local or strategy.num_workers == 1
        # One from outside of the scope, which no step changes, is there once for all replicas.
        created_here = strategy.extended.variable_created_in_scope
        variables = [each for each in _variables(model) if created_here(each.value)]
        self._names = [variable.path for variable in variables]
        self._copies = [strategy.experimental_local_results(each.value) for each in variables]
        replicas = zip(*self._copies, strict=True)
        self._digests = [hashlib.sha256(digest(replica)).digest() for replica in replicas]

    @property
    def notes(self) -> list[int]:
        """The digest of the first replica here, and the number of others that differ from it."""
        if not self._digests:
            return [0, 0]
        first, *others = self._digests
        of_first = 0 if self._is_alone else int.from_bytes(first[:8], "little", signed=True)
        return [of_first, sum(other != first for other in others)]

    def differ(self, everyone: np.ndarray) -> bool:
        """Tell from the notes of all workers whether any two replicas differ."""
        return bool((everyone[:, 0] != everyone[0, 0]).any() or everyone[:, 1].any())

    def values(self) -> list[np.ndarray]:
        """Return the values that all should have: the chief's, or this worker's if it is alone."""
        own = [np.asarray(copies[0].read_value()) for copies in self._copies]
        if self._is_alone:
            return own
        flat = b"".join(value.tobytes() for value in own)
        words = np.frombuffer(flat + bytes(-len(flat) % 4), np.int32)
        add = tf.function(self._strategy.extended.sum_over_workers, autograph=False)
        with tf.device("CPU:0"):
            sent = tf.constant(words if self._strategy.is_chief else np.zeros_like(words))
            of_chief = np.asarray(add(sent)).view(np.uint8)
        parts = np.split(of_chief, np.cumsum([value.nbytes for value in own]))
        return [
            part.view(value.dtype).reshape(value.shape)
            for part, value in zip(parts, own, strict=False)
        ]

    def differences(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return all replicas' digests, relative to the size; float64 [replicas, variables]."""
        layout = self._strategy.layout
        own = np.zeros([max(layout.replicas_per_worker), len(values)])
        for place, (copies, value) in enumerate(zip(self._copies, values, strict=True)):
            own[: len(copies), place] = [_difference(np.asarray(each), value) for each in copies]
        everyone = self._strategy.extended.gather_over_workers(own)
        of_workers = np.split(everyone, layout.num_workers)
        counts = layout.replicas_per_worker
        return np.concatenate(
            [rows[:count] for rows, count in zip(of_workers, counts, strict=True)]
        )

    def tell(self, differences: np.ndarray, epoch: int) -> None:
        if not self._strategy.is_chief:
            return
        layout = self._strategy.layout
        replica, place = np.unravel_index(differences.argmax(), differences.shape)
        worker = next(
            each for each in range(layout.num_workers) if replica in layout.replicas_of(each)
        )
        other = layout.replicas_of(worker).start if self._is_alone else 0
        number = int((differences > 0).any(axis=0).sum())
        name, size = self._names[place], differences[replica, place]
        _logger.warning(
            _WARNING, epoch, name, size, replica, worker, other, number, len(self._names)
        )

    def assign(self, values: Sequence[np.ndarray]) -> None:
        for copies, value in zip(self._copies, values, strict=True):
            for copy in copies:
                copy.assign(value)


def _variables(model: keras.Model) -> list[keras.Variable]:
    optimizer = getattr(model, "optimizer", None)
    found = [*model.weights, *(optimizer.variables if optimizer is not None else ())]
    apart = variables_left_apart(model)
    return [
        variable
        for variable in {id(each): each for each in found}.values()
        if id(variable) not in apart
        and variable.dtype != "string"
        and variable.value.synchronization != tf.VariableSynchronization.ON_READ
    ]


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference over the largest value; above zero where any bit differs."""
    if one.tobytes() == other.tobytes():
        return 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    size = max(np.abs(one).max(), np.abs(other).max())
    with np.errstate(invalid="ignore"):
        found = np.abs(one - other).max() / (size or 1.0)
    return max(float(np.nan_to_num(found, nan=np.inf)), _LEAST)


_PIECE = 2**18
_SMALL = 2**14
_OF_PIECES = 0x5851F42D4C957F2D
_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint32}


def digest(variables: Sequence[tf.Variable]) -> bytes:
    """Return what tells the bits of one device's variables; only few bytes leave the device."""
    # Different bits have it in common about once in 2^64 cases.
    if not variables:
        return b""
    with tf.device(variables[0].device):
        large: list[tf.Tensor] = []
        small: dict[tf.DType, list[tf.Tensor]] = {}
        for variable in variables:
            words = _words(variable.read_value())
            # a call for each of hundreds of small ones would take longer than all the rest
            is_large = words.shape[0] > _SMALL
            (large if is_large else small.setdefault(words.dtype, [])).append(words)
        parts = [*(tf.concat(group, 0) for group in small.values()), *large]
        factors = tf.constant(_factors())
        sums = [
            _function(each.dtype)(each, factors) if each.shape[0] > _PIECE else _add(each, factors)
            for each in parts
        ]
        return np.asarray(tf.stack(sums)).tobytes()


def _words(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    bits = _BITS[value.dtype.size]
    return tf.reshape(value if value.dtype == bits else tf.bitcast(value, bits), [-1])


def _add(piece: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(piece, tf.int64) * factors[: tf.size(piece)])


@functools.cache
def _function(bits: tf.DType) -> tf.types.experimental.ConcreteFunction:
    r"""Return a function that adds up words, each times a factor of its place."""
    # sum_i f_i w_i mod 2^64, piece by piece: beside the variable it needs a few megabytes

    @tf.function(autograph=False)
    def digest_words(words: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
        size = tf.size(words, tf.int64)

        def add(begin: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            own = _add(words[begin : begin + _PIECE], factors)
            with tf.device("CPU:0"):
                following = begin + _PIECE
            return following, total * _OF_PIECES + own

        def is_left(begin: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            # Counted by the host: where a GPU counts, the host waits for it in each round.
            with tf.device("CPU:0"):
                return begin < size

        start = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        return tf.while_loop(is_left, add, start)[1]

    with tf.init_scope():
        return digest_words.get_concrete_function(
            tf.TensorSpec([None], bits), tf.TensorSpec([_PIECE], tf.int64)
        )


@functools.cache
def _factors() -> np.ndarray:
    """Return odd numbers that look random, and are the same with every version of numpy."""
    mixed = np.arange(1, _PIECE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)
