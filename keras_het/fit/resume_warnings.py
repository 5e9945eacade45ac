"""Warnings of what a resumed training does otherwise than an undisturbed one."""

from __future__ import annotations

import logging
from typing import Any

import keras

_logger = logging.getLogger("keras_het")


def about(optimizer: Any) -> list[Any]:
    """Class and learning rate of an optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [type(inner).__name__, float(keras.ops.convert_to_numpy(inner.learning_rate))]


def warn_of_another_optimizer(at_first: list[Any], optimizer: Any, before: Any) -> None:
    """Compare what `about` said when `fit` began with what it said before the backup."""
    if before and at_first not in before:
        _logger.warning(
            "The optimizer has changed. Received: %s with learning rate %g; the training of "
            "the backup began with %s and %g. It goes on with %s and %g, after %d steps of it.",
            *(*at_first, *before[0], *about(optimizer)),
            keras.ops.convert_to_numpy(optimizer.iterations),
        )


def warn_of_another_order(now: list[list[int]] | None, before: list[list[int]] | None) -> None:
    """Compare the seeds of shuffles; 0 and 0 for one whose order cannot be restored."""
    if before is None or now is None or (before == now and [0, 0] not in now):
        return
    _logger.warning(
        "Training goes on in the middle of an epoch, but the data are shuffled in another "
        "order than before the backup: of this epoch some samples are used twice and others "
        "not at all. Received: shuffles with seeds %s, before %s (0 for none). Call "
        "keras.utils.set_random_seed with the same number at the start of every run.",
        now,
        before,
    )


def warn_of_a_shared(source: str) -> None:
    _logger.warning(
        "If this training is interrupted from here on, a resumed one has other samples in its "
        "epochs or validations: both draw in turn from one %s, and a backup cannot hold what "
        "each has drawn. Give validation_data a tf.data.Dataset of its own, without shuffle.",
        source,
    )
