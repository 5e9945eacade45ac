"""Installation of the exact step's hooks into Keras while a step is traced, and their removal.

Nothing is changed at import, and nothing stays changed after `HeterogeneousStrategy.run` has
returned. While installed, the hooks do nothing outside of an exact step, so a second model that
trains in another thread is not affected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact import emulated_device, gradients, losses, replica_threads, state
from keras_het.strategy.exact.step import ExactStep

_Hook = Callable[[Callable[..., Any]], Callable[..., Any]]

# Keras 3.16 imports the function by name into a second module.
_REDUCTIONS = [
    (module, "reduce_weighted_values")
    for module in (private_api.keras_loss, private_api.keras_losses)
    if hasattr(module, "reduce_weighted_values")
]


def _hooks() -> list[tuple[Any, str, _Hook]]:
    loss = private_api.keras_loss
    layer = keras.layers.Layer
    metrics = private_api.keras_reduction_metrics
    optimizer = private_api.keras_base_optimizer.BaseOptimizer
    loss_scale_optimizer = private_api.keras_loss_scale_optimizer.LossScaleOptimizer
    tf_optimizer = private_api.keras_tf_optimizer.TFOptimizer
    batch_normalization = private_api.keras_batch_normalization.BatchNormalization
    cell = private_api.DropoutRNNCell
    apply = gradients.UpdateHooks(_gradients_are_computed).apply
    return [
        (loss, "scale_loss_for_distribution", losses.keep_local_mean),
        (loss, "unscale_loss_for_distribution", losses.keep_local_mean),
        *[(module, name, losses.reduce_exactly) for module, name in _REDUCTIONS],
        (layer, "add_loss", replica_threads.keep_losses),
        (layer, "_get_own_losses", replica_threads.keep_losses),
        (layer, "_clear_losses", replica_threads.keep_losses),
        (cell, "get_dropout_mask", replica_threads.keep_masks),
        (cell, "get_recurrent_dropout_mask", replica_threads.keep_masks),
        (cell, "reset_dropout_mask", replica_threads.keep_masks),
        (cell, "reset_recurrent_dropout_mask", replica_threads.keep_masks),
        (
            private_api.BaseTrainer,
            "_aggregate_additional_loss",
            losses.sum_added_losses,
        ),
        (tf.GradientTape, "gradient", losses.sum_over_samples),
        (tf.nn, "compute_average_loss", losses.average_exactly),
        (metrics.Mean, "update_state", losses.weigh_scalar_updates),
        (metrics.Sum, "update_state", losses.weigh_scalar_updates),
        (optimizer, "scale_loss", gradients.weigh_loss),
        (loss_scale_optimizer, "scale_loss", gradients.weigh_loss),
        (optimizer, "apply", apply),
        (loss_scale_optimizer, "apply", apply),
        (tf_optimizer, "_all_reduce_sum_gradients", gradients.skip_second_reduction),
        (private_api.KerasTensorFlowVariable, "_direct_assign", state.record_assignment),
        *[
            (private_api.ResourceVariable, name, state.record_plain_assignment)
            for name in dir(private_api.ResourceVariable)
            if name.startswith(("assign", "scatter_", "batch_scatter_", "_strided_slice_assign"))
        ],
        (private_api.keras_nn, "_compute_moments_sync", state.sum_statistics_exactly),
        (batch_normalization, "_moments", state.sum_masked_statistics_exactly),
        (private_api.keras_seed_generator.SeedGenerator, "next", state.draw_own_stream),
        (
            private_api.keras_seed_generator,
            "global_seed_generator",
            replica_threads.share_seed_generator,
        ),
        (
            private_api.distribute_values,
            "apply_aggregation_replica_context",
            state.update_in_place,
        ),
    ]


def _hooks_of_subclasses() -> list[tuple[Any, str, _Hook]]:
    """Hooks for optimizers that override methods hooked in their parents."""
    hooked = {(owner, name) for owner, name, _ in _hooks()}
    updates = gradients.UpdateHooks(_gradients_are_computed)
    hooks = {
        "scale_loss": gradients.weigh_loss,
        "apply": updates.apply,
        "apply_gradients": updates.apply_gradients,
    }
    return [
        (owner, name, hook)
        for owner in _subclasses(private_api.keras_base_optimizer.BaseOptimizer)
        for name, hook in hooks.items()
        if name in vars(owner) and (owner, name) not in hooked
    ]


def _subclasses(parent: type) -> set[type]:
    children: list[type] = parent.__subclasses__()
    return {*children, *(found for child in children for found in _subclasses(child))}


def _gradients_are_computed(step: ExactStep, gradients: list[Any]) -> list[Any]:
    delayed = emulated_device.wait_until_computed(step, gradients)
    if step.clock is not None:
        # Emulated time ends here, not at the gate, which opens for all local replicas.
        step.clock.stop(gradients if step.waited is None else [step.waited])
    return delayed


_lock = threading.Lock()
_num_users = 0
_originals: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def keras_hooks() -> Iterator[None]:
    """Keep the hooks in place while the context is open (re-entrant, thread-safe)."""
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0:
                _remove()


def _install() -> None:
    for owner, name, hook in [*_hooks(), *_hooks_of_subclasses()]:
        original = vars(owner).get(name)
        _originals.append((owner, name, original))
        setattr(owner, name, hook(getattr(owner, name)))


def _remove() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
