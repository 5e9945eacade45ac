"""What a training leaves for the one that resumes it, and what keeps that from being alike."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from keras_het.private_api import EpochLoop
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

State = dict[str, np.ndarray]
"""Arrays, by their names in a backup."""


@dataclasses.dataclass
class TrainingState:
    """State of the training that runs under a strategy and that no model holds."""

    export: Callable[[], State | None] | None = None
    restored: State | None = None
    export_times: Callable[[], str] | None = None
    """What the balancer knows of its devices, as JSON; see `planning.time_model`."""
    restored_times: str = ""
    num_hybrid_runs: int = 0
    role_trials_left: int = 3

    def forget_center(self) -> None:
        """Discard the state of a center that has ended: no later training continues from it."""
        self.export = self.restored = None


AUTO = "auto"
# Of the time of a training, the part that its backups may take.
_COST = 0.02
_LEAST_SECONDS = 1.0


# Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
class BackupInterval:
    """Steps between backups, from their measured cost and the interruptions of the training."""

    def __init__(self) -> None:
        # of the training, also before it was interrupted
        self._began, self._num_interruptions = 0.0, 0
        self._saved_at, self._num_steps = 0.0, 0

    def begin(self) -> None:
        """Begin a `fit`."""
        self._began, self._num_interruptions = time.time(), 0
        self._saved_at, self._num_steps = time.monotonic(), 0

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue the training of a backup, which has been interrupted."""
        self._began = position.get("began", self._began)
        self._num_interruptions = position.get("interruptions", 0) + 1

    def position(self) -> dict[str, Any]:
        """Return what a backup holds of it."""
        return {"began": self._began, "interruptions": self._num_interruptions}

    def count_step(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def next_after(self, cost: float, strategy: HeterogeneousStrategy) -> int:
        """Return after how many steps the next backup follows, on all workers alike."""
        step = (time.monotonic() - self._saved_at - cost) / max(1, self._num_steps)
        rate = self._num_interruptions / max(time.time() - self._began, 1.0)
        own = np.array([[cost, step, rate]], np.float64)
        cost, step, rate = strategy.extended.gather_over_workers(own).max(axis=0).tolist()
        seconds = min(cost / _COST, math.sqrt(2 * cost / rate) if rate > 0 else math.inf)
        self._saved_at, self._num_steps = time.monotonic(), 0
        return max(1, math.ceil(max(seconds, _LEAST_SECONDS) / max(step, 1e-6)))


def metric_values(model: keras.Model) -> np.ndarray:
    """Values of all metrics' variables: float64 of shape (local replicas, numbers)."""
    columns = [
        np.stack([np.ravel(part.numpy()).astype(np.float64) for part in _parts(variable)])
        for variable in model.metrics_variables
    ]
    rows = max((len(column) for column in columns), default=1)
    columns = [np.repeat(each, rows, axis=0) if len(each) == 1 else each for each in columns]
    return np.concatenate(columns, axis=1) if columns else np.zeros((rows, 0))


def add_metrics(model: keras.Model, strategy: HeterogeneousStrategy, values: np.ndarray) -> None:
    """Continue from the metrics of all replicas, however many there are now."""
    variables = model.metrics_variables
    sizes = [int(np.prod(variable.shape, dtype=int)) for variable in variables]
    if sum(sizes) != values.shape[1]:
        return  # other metrics than before
    replicas = list(strategy.layout.local_replicas)
    is_same = len(values) == strategy.num_replicas_in_sync
    for variable, columns in zip(
        variables, np.split(values, np.cumsum(sizes)[:-1], axis=1), strict=True
    ):
        for replica, part in zip(replicas, _parts(variable), strict=False):
            if is_same:
                row = columns[replica]
            elif variable.aggregation != "sum":
                row = columns[0]
            elif replica == 0:
                row = columns.sum(axis=0)
            else:
                continue
            part.assign(tf.cast(row.reshape(variable.shape), part.dtype))


def _parts(variable: keras.Variable) -> tuple[tf.Variable, ...]:
    """The variables of this process's replicas."""
    return tuple(getattr(variable.value, "values", (variable.value,)))


_logger = logging.getLogger(__name__)


def about(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Class and learning rate of an optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [type(inner).__name__, float(keras.ops.convert_to_numpy(inner.learning_rate))]


def check_batch_size(now: int | None, position: Mapping[str, Any]) -> None:
    """Refuse to count global batches of another size than before the backup."""
    before = position.get("global_batch_size")
    if position["pass_step"] and before and now and before != now:
        raise ValueError(
            "The backup was written within an epoch, after a number of global batches. "
            f"Received: data in batches of {now} samples; expected: {before}, as before the "
            f"backup. Give fit batches of {before} samples, at least until the epoch ends."
        )


def warn_of_another_optimizer(at_first: list[Any], optimizer: Any, before: Any) -> None:
    """Compare what `about` said when `fit` began with what it said before the backup."""
    if before and at_first not in before:
        _logger.warning(
            "The optimizer has changed. Received: %s with learning rate %g; the training of "
            "the backup began with %s and %g. It continues with %s and %g, after %d steps of it.",
            *(*at_first, *before[0], *about(optimizer)),
            keras.ops.convert_to_numpy(optimizer.iterations),
        )


def warn_of_another_order(now: list[list[int]] | None, before: list[list[int]] | None) -> None:
    """Compare the seeds of shuffles; 0 and 0 for one whose order cannot be restored."""
    if before is None or now is None or (before == now and [0, 0] not in now):
        return
    _logger.warning(
        "Training continues in the middle of an epoch, but the data are shuffled in another "
        "order than before the backup: of this epoch some samples are used twice and others "
        "not at all. Received: shuffles with seeds %s, before %s (0 for none). Call "
        "keras.utils.set_random_seed with the same number at the start of every run.",
        now,
        before,
    )


def warn_of_turns(loop: EpochLoop, data: Any, pass_step: int) -> bool:
    """Warn if what a validation takes is missing where a pass or a validation continues to take."""
    shares_orders = getattr(data, "shares_orders_with", lambda other: False)
    source = "generator" if loop.validates_on_generator else None
    if source is None and pass_step and shares_orders(loop.validation_data):
        source = "shuffle"
    if source is not None:
        _logger.warning(
            "If this training is interrupted from here on, a resumed one has other samples in its "
            "epochs or validations: they draw in turn from one %s, and a backup cannot hold what "
            "each has drawn. Give validation_data a tf.data.Dataset that does not read from it.",
            source,
        )
    return source is not None


def restore_validation(data: Any, passes: Sequence[Any]) -> None:
    """Make the next validation the one after these passes over its own data."""
    try:
        data.start_at(passes, 0)
    except ValueError as error:
        _logger.warning("Validations have another order than before the backup. %s", error)
