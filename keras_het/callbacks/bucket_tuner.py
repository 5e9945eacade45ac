"""Sum gradients in buckets where that makes a step faster."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.fit.model_strategy import (
    heterogeneous_strategy,
    say_nothing_is_exchanged,
    tell,
)
from keras_het.planning.argument_checks import check_number, check_verbose, expect
from keras_het.stability import experimental
from keras_het.strategy.keras_calls import SessionCallback

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

NUM_ROUNDS = 3
NUM_LEFT_OUT = 2
"""Executions after a change of size that are not timed: the first one may trace."""


@experimental
class BucketTuner(SessionCallback):
    r"""Callback that finds the bucket size with which the gradients of a step are summed fastest.

    Gradients are summed over replicas in one collective after the backward pass, or in buckets
    while the backward pass still computes others (`bytes_per_pack` of `CommunicationOptions`).
    Which is faster depends on the model, the link and the devices. This callback trains some steps
    with each of a few sizes, taking turns, and keeps

    .. math:: \arg\min_s \operatorname{median}_r \frac{t_{r,s}}{t_{r,0}},

    or the strategy's own size (one sum by default, size 0) unless another is at least 2 % faster.
    :math:`t_{r,s}` is the chief's time for an execution with size s in round r. Every step trains,
    and the weights are bit for bit the same whatever the size.

    Each size costs one more trace. During the trial, the host waits for its device twice in each
    block of `steps` executions; afterwards it never does.

    Sizes make no difference with one replica, with `micro_batch_size` or in `LocalTraining`: there
    nothing is tried.

    Args:
        sizes: bucket sizes to try in bytes, beside one sum. Default: a third, a twelfth and a 48th
            of the model's gradients, rounded down to powers of two, and at least 1 MiB.
        steps: executions of Keras (steps, unless `steps_per_execution` is larger) that are timed
            with each size in each of three rounds.
        verbose: 1 prints the result on the chief; it is always logged at level INFO.

    Attributes:
        size: the chosen size in bytes, 0 for one sum; None while it is not known.
        step_seconds: dict from each size to the seconds of an execution with it (a step, unless
            `steps_per_execution` is larger): those of the first size times the median ratio.

    Raises:
        ValueError: if a size or `steps` is not a whole number above 0; by `fit`, if the model does
            not train under a `keras_het.HeterogeneousStrategy`.

    Reference:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training",
        PVLDB 13, 2020 (buckets, and that their best size has to be measured).
    """

    def __init__(
        self, sizes: Sequence[int] | None = None, *, steps: int = 10, verbose: int = 0
    ) -> None:
        super().__init__()
        is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
        expected = "a list of numbers of bytes, with at least one"
        expect(sizes is None or (is_list and len(sizes) > 0), expected, sizes=sizes)
        for size in sizes or ():
            check_number("sizes", size, least=1, whole=True)
        check_number("steps", steps, least=1, whole=True)
        check_verbose(verbose)
        self._given_sizes = sizes if sizes is None else [int(size) for size in sizes]
        self._given_steps, self._verbose = steps, verbose
        self._strategy: HeterogeneousStrategy
        self._size_of_strategy = ONE_SUM
        self._tuned: weakref.ref[keras.Model] | None = None
        self._functions: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []  # of an execution, for each block that is over
        self._block: _Block | None = None
        self._steps_in_epoch: int | None = None
        self._latest_batch = 0
        self.size: int | None = None
        self.step_seconds: dict[int, float] = {}

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Start the trial, or use what an earlier `fit` has found."""
        self._strategy = strategy = heterogeneous_strategy(self.model, self)
        self._size_of_strategy = strategy.extended.bytes_per_bucket
        session = self._required_session()
        session.on_end(self._leave)
        if self._tuned is None or self._tuned() is not self.model:
            self._tuned, self.size = weakref.ref(self.model), None
        is_alone = strategy.num_replicas_in_sync == 1
        if is_alone:
            say_nothing_is_exchanged(self, strategy, "as it has one replica")
        if self.size is None:
            others = [type(each).__name__ for each in session.callbacks]
            extended = strategy.extended
            is_cut = extended.micro_batch_sizes is not None or extended.compute_times.cuts
            self._sizes = [self._size_of_strategy]
            if not (is_cut or is_alone or "LocalTraining" in others):
                self._sizes = self._sizes_to_try()
            self._seconds = []
            if len(self._sizes) == 1:
                self.size = self._sizes[0]
        self._use(self._sizes[0] if self.size is None else self.size)
        self._block = _Block(self._given_steps) if self.size is None else None

    def _sizes_to_try(self) -> list[int]:
        sizes = self._given_sizes
        if sizes is None:
            variables = self.model.trainable_variables
            num_bytes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables]
            sizes = sizes_to_try(sum(num_bytes))
        return list(dict.fromkeys([self._size_of_strategy, ONE_SUM, *sizes]))

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Leave out the time between two epochs."""
        if self._block is not None:
            self._block.forget_start()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Time some executions with each size."""
        if self._block is None:
            return
        in_epoch = self.params.get("steps") or self._steps_in_epoch
        is_last = in_epoch is not None and batch + 1 >= in_epoch
        self._latest_batch = batch
        if not self._block.is_over_after(logs, is_last):
            return
        self._seconds.append(self._block.seconds)
        position = len(self._seconds)
        if position < NUM_ROUNDS * len(self._sizes):
            self._block = _Block(self._given_steps)
            self._use(self._sizes[position % len(self._sizes)])
        else:
            self._block = None
            self._choose()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Learn the length of an epoch, which Keras may not know."""
        if self._block is not None:
            self._steps_in_epoch = self._latest_batch + 1

    def _choose(self) -> None:
        """Use the fastest size: on all workers after the same step, by the chief's times."""
        everyone = self._strategy.extended.gather_over_workers(np.array([self._seconds]))
        seconds = typical_seconds(everyone[0].reshape(NUM_ROUNDS, len(self._sizes)))
        self.step_seconds = dict(zip(self._sizes, seconds.tolist(), strict=True))
        self.size = fastest(self._sizes, seconds)
        self._use(self.size)
        self._functions = {self.size: self._functions[self.size]}
        times = ", ".join(f"{1e3 * s:.2f} ms {_named(b)}" for b, s in self.step_seconds.items())
        text = f"gradients travel {_named(self.size)} ({times})"
        tell(f"BucketTuner: {text}.", self._strategy, self._verbose)
        self._required_session().note_change("buckets", text)

    def _use(self, size: int) -> None:
        """Continue with the train function of a size, which is traced at its first call."""
        function = vars(self.model).get("train_function")
        if function not in self._functions.values():  # made by Keras, or for another callback
            self._functions = {self._strategy.extended.bytes_per_bucket: function}
        self._strategy.extended.bytes_per_bucket = size
        if size not in self._functions:
            self.model.make_train_function(force=True)
            self._functions[size] = vars(self.model)["train_function"]
        self.model.train_function = self._functions[size]

    def _leave(self) -> None:
        """Leave the strategy as it was; a trial that has not ended starts again in the next fit."""
        if self._block is not None:
            self._use(self._sizes[0])
            self._block = None
        self._strategy.extended.bytes_per_bucket = self._size_of_strategy


class _Block:
    """Executions of Keras with one size, of which some are timed: not across epochs."""

    def __init__(self, num_executions: int) -> None:
        self._num_executions = num_executions
        self._num_left_out = self._num_running = self._num_timed = 0
        self._start, self._timed = math.nan, 0.0

    @property
    def seconds(self) -> float:
        """Seconds of an execution."""
        return self._timed / self._num_timed

    def forget_start(self) -> None:
        self._start, self._num_running = math.nan, 0

    def is_over_after(self, logs: Mapping[str, float] | None, is_last_of_epoch: bool) -> bool:
        """Note the end of an execution."""
        if math.isnan(self._start):
            self._num_left_out += 1
            if self._num_left_out >= NUM_LEFT_OUT and not is_last_of_epoch:
                self._start = _time_computed(logs)
            return False
        self._num_running += 1
        is_over = self._num_timed + self._num_running >= self._num_executions
        if is_over or is_last_of_epoch:
            self._timed += _time_computed(logs) - self._start
            self._num_timed += self._num_running
            self.forget_start()
        return is_over


def _time_computed(logs: Mapping[str, float] | None) -> float:
    """Return the time when the device has computed an execution, given its logs."""
    dict(logs or {})  # numbers, which have to exist
    return time.perf_counter()


def _named(size: int) -> str:
    if size == ONE_SUM:
        return "in one sum"
    unit, number = ("MiB", 2**20) if size >= 2**20 else ("bytes", 1)
    return f"in buckets of {size / number:g} {unit}"


ONE_SUM = 0
"""The size that stands for all gradients at once."""
LEAST_BYTES = 2**20
NUM_BUCKETS = (3, 12, 48)
"""About as many buckets as a model is cut into at each size."""
LEAST_GAIN = 0.02


def sizes_to_try(num_bytes: int) -> list[int]:
    """Return sizes in bytes for gradients of that many, `ONE_SUM` first, then the larger first."""
    sizes = [
        2 ** int(np.log2(num_bytes / number))
        for number in NUM_BUCKETS
        if num_bytes >= LEAST_BYTES * min(NUM_BUCKETS[0], number)
    ]
    return [ONE_SUM, *sorted({max(size, LEAST_BYTES) for size in sizes}, reverse=True)]


def typical_seconds(seconds: np.ndarray) -> np.ndarray:
    """Return the seconds of a step with each size, given a row a round and a column a size."""
    # Shares and the load of a machine change between rounds: medians of each size may mislead.
    return np.median(seconds[:, 0]) * np.median(seconds / seconds[:, :1], axis=0)


def fastest(sizes: Sequence[int], seconds: np.ndarray) -> int:
    """Return the size with the shortest steps, or the first one if none gains 2 % on it."""
    best = int(np.argmin(seconds))
    return sizes[best] if seconds[best] <= (1 - LEAST_GAIN) * seconds[0] else sizes[0]
