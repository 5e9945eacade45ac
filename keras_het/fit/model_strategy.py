"""The strategy of a model, for callbacks that cannot work without it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.seen_versions import check_keras_backend

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)


class OwnStrategy(tf.distribute.Strategy):
    """Base of the strategies of this package."""

    # by class names: why a callback does not work under the strategy
    _refused_callbacks: ClassVar[dict[str, str]] = {}


def tell(message: object, strategy: object, verbose: int) -> None:
    """Log a callback's action at level INFO, and print it on the chief if the user wants that."""
    _logger.info("%s", message)
    if verbose and getattr(strategy, "is_chief", True):
        # Keras's progress bar may occupy the line.
        sys.stdout.write(f"\n{message}\n")


def say_nothing_is_exchanged(callback: object, strategy: HeterogeneousStrategy, why: str) -> None:
    """Say on the chief that a callback leaves this training as it is, which is no error."""
    if strategy.is_chief:
        name = type(callback).__name__
        _logger.warning("%s: there is nothing to exchange in this training, %s.", name, why)


def distribute_strategy(model: keras.Model) -> tf.distribute.Strategy:
    """Return the strategy under which a model trains, or TensorFlow's default one."""
    check_keras_backend(keras.backend.backend())
    return model.distribute_strategy


def heterogeneous_strategy(model: keras.Model, callback: object) -> HeterogeneousStrategy:
    strategy = distribute_strategy(model)
    if not isinstance(strategy, OwnStrategy):
        name = type(callback).__name__
        given = type(strategy).__name__
        given = "no strategy" if given.startswith("_") else f"a {given}"  # TensorFlow's default one
        raise ValueError(
            f"keras_het.callbacks.{name} needs a model that was built under a "
            f"keras_het.HeterogeneousStrategy. Received: a model that was built under {given}. "
            "Make strategy = keras_het.HeterogeneousStrategy(), build and compile the model within "
            f"`with strategy.scope():`, or leave {name} out."
        )
    refused = strategy._refused_callbacks
    for kind in type(callback).__mro__:
        if kind.__name__ in refused:
            strategy_name = type(strategy).__name__
            raise ValueError(
                f"{kind.__name__} does not work under a {strategy_name}: {refused[kind.__name__]}. "
                f"Received: {type(callback).__name__} in the fit of a model under one. Leave it "
                "out, or train under keras_het.HeterogeneousStrategy."
            )
    return cast("HeterogeneousStrategy", strategy)


def data_of_fit(model: keras.Model, strategy: HeterogeneousStrategy) -> Any:
    """Return the distributed dataset that a running `fit` trains on, None if there is none."""
    # The strategy's most recently iterated dataset may be that of another callback's evaluation.
    data = private_api.EpochLoop(model).data
    return strategy.extended.data_path.iterated() if data is None else data


def check_keeps_weights(optimizer: keras.optimizers.Optimizer | None, callback: object) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "use_ema", False):
        name = type(callback).__name__
        raise ValueError(
            f"With {name} the model ends with the center's weights, not with averages of one "
            f"worker's. Received: {type(inner).__name__}(use_ema=True). Leave use_ema out."
        )


def local_replicas(model: keras.Model) -> dict[int, str]:
    """Return the devices of the replicas of this process, by their numbers."""
    strategy = distribute_strategy(model)
    try:
        devices = strategy.extended.worker_devices
    except RuntimeError:  # there is no strategy
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [found[0].name]
    is_own = isinstance(strategy, OwnStrategy)
    numbers = strategy.layout.local_replicas if is_own else range(len(devices))
    return dict(zip(numbers, devices, strict=True))
