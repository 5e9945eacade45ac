"""Installation of the exact step's hooks into Keras while a step is traced, and their removal.

Nothing is changed at import, and nothing stays changed after `HeterogeneousStrategy.run` has
returned. While installed, the hooks do nothing outside of an exact step, so a second model that
trains in another thread is not affected.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact import replica_threads
from keras_het.strategy.exact.step import ExactStep, current_step, running_step

_Hook = Callable[[Callable[..., Any]], Callable[..., Any]]
_Verb = Callable[[ExactStep], Callable[..., Any]]
"""What a step does instead of a function of Keras, which it gets as its first argument."""

# Keras 3.16 imports the function by name into a second module.
_REDUCTIONS = [
    (module, "reduce_weighted_values")
    for module in (private_api.keras_loss, private_api.keras_losses)
    if hasattr(module, "reduce_weighted_values")
]


def _of_step(verb: _Verb, find: Callable[[], ExactStep | None] = current_step) -> _Hook:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            step = find()
            if step is None:
                return original(*args, **kwargs)
            return verb(step)(original, *args, **kwargs)

        return hooked

    return hook


def _of_any_step(verb: _Verb) -> _Hook:
    """As `_of_step`, also in predictions."""
    return _of_step(verb, running_step)


def _hooks() -> list[tuple[Any, str, _Hook]]:
    loss, nn, trainer = private_api.keras_loss, private_api.keras_nn, private_api.BaseTrainer
    metrics, seeds = private_api.keras_reduction_metrics, private_api.keras_seed_generator
    layer, cell = keras.layers.Layer, private_api.DropoutRNNCell
    normalization = private_api.keras_batch_normalization.BatchNormalization
    optimizer = private_api.keras_base_optimizer.BaseOptimizer
    scaling_optimizer = private_api.keras_loss_scale_optimizer.LossScaleOptimizer
    tf_optimizer = private_api.keras_tf_optimizer.TFOptimizer
    variable, plain_variable = private_api.KerasTensorFlowVariable, private_api.ResourceVariable
    values = private_api.distribute_values
    keep_local = _of_step(lambda s: s.means.keep_local)
    reduce = _of_step(lambda s: s.means.reduce)
    update_scalar = _of_step(lambda s: s.means.update_scalar)
    of_optimizer = _hooks_of_optimizers()
    aggregate = _of_any_step(lambda s: s.own_state.aggregate)
    assign_plain = _of_any_step(lambda s: s.assignments.assign_plain)
    assigns = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign")
    return [
        # weights of samples
        (loss, "scale_loss_for_distribution", keep_local),
        (loss, "unscale_loss_for_distribution", keep_local),
        *[(module, name, reduce) for module, name in _REDUCTIONS],
        (trainer, "_aggregate_additional_loss", _of_step(lambda s: s.means.sum_added)),
        (tf.GradientTape, "gradient", _of_step(lambda s: s.means.gradient)),
        (metrics.Mean, "update_state", update_scalar),
        (metrics.Sum, "update_state", update_scalar),
        (nn, "_compute_moments_sync", _of_any_step(lambda s: s.means.moments)),
        (normalization, "_moments", _of_any_step(lambda s: s.means.masked_moments)),
        # gradients
        (optimizer, "scale_loss", of_optimizer["scale_loss"]),
        (scaling_optimizer, "scale_loss", of_optimizer["scale_loss"]),
        (optimizer, "apply", of_optimizer["apply"]),
        (scaling_optimizer, "apply", of_optimizer["apply"]),
        (tf_optimizer, "_all_reduce_sum_gradients", _of_step(lambda s: s.gradients.keep_reduced)),
        # state
        (variable, "_direct_assign", _of_any_step(lambda s: s.assignments.assign)),
        *[(plain_variable, n, assign_plain) for n in dir(plain_variable) if n.startswith(assigns)],
        (values, "apply_aggregation_replica_context", aggregate),
        (seeds.SeedGenerator, "next", _of_any_step(lambda s: s.own_state.draw_seed)),
        # Python state of each replica
        (seeds, "global_seed_generator", replica_threads.share_seed_generator),
        (layer, "add_loss", replica_threads.keep_losses),
        (layer, "_get_own_losses", replica_threads.keep_losses),
        (layer, "_clear_losses", replica_threads.keep_losses),
        (cell, "get_dropout_mask", replica_threads.keep_masks),
        (cell, "get_recurrent_dropout_mask", replica_threads.keep_masks),
        (cell, "reset_dropout_mask", replica_threads.keep_masks),
        (cell, "reset_recurrent_dropout_mask", replica_threads.keep_masks),
    ]


def _hooks_of_optimizers() -> dict[str, _Hook]:
    return {
        "scale_loss": _of_step(lambda s: s.gradients.scale_loss),
        "apply": _of_step(lambda s: s.gradients.apply),
        "apply_gradients": _of_step(lambda s: s.gradients.apply_gradients),
    }


def _hooks_of_subclasses() -> list[tuple[Any, str, _Hook]]:
    """Hooks for optimizers that override methods hooked in their parents."""
    hooked = {(owner, name) for owner, name, _ in _hooks()}
    return [
        (owner, name, hook)
        for owner in _subclasses(private_api.keras_base_optimizer.BaseOptimizer)
        for name, hook in _hooks_of_optimizers().items()
        if name in vars(owner) and (owner, name) not in hooked
    ]


def _subclasses(parent: type) -> set[type]:
    children: list[type] = parent.__subclasses__()
    return {*children, *(found for child in children for found in _subclasses(child))}


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


@contextlib.contextmanager
def recorded_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Make steps record which tensor is the result of which of these metrics."""
    distinct = list({id(metric): metric for metric in metrics}.values())
    for metric in distinct:
        hook = _of_step(functools.partial(_recording, metric))
        object.__setattr__(metric, "result", hook(metric.result))
    try:
        yield
    finally:
        for metric in distinct:
            object.__delattr__(metric, "result")


def _recording(metric: keras.metrics.Metric, step: ExactStep) -> Callable[..., Any]:
    return functools.partial(step.metrics.record, metric)


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
