"""What keeps a resumed training from being as an undisturbed one: errors, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from keras_het.private_api import EpochLoop

_logger = logging.getLogger(__name__)


def about(optimizer: Any) -> list[Any]:
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
