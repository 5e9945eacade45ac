"""Installation of the exact step's hooks into Keras while a step is traced, and their removal.

While installed, the hooks do nothing outside of an exact step: a second model that trains in
another thread is not affected.

Replicas of one process are threads that take turns at each collective, in the forward pass too.
What a replica writes before its turn ends and reads when it continues must be its own; what Keras
keeps per thread must be that of the thread that called `fit`. Found in Keras 3.14, by checking all
assignments to attributes outside of `__init__` and `build`, and all of `global_state`:

* `Layer._losses` and the two masks of a `DropoutRNNCell` would be mixed: each replica has its own.
* Of other attributes each replica writes the same, or reads them before its turn ends.
* Scopes are opened and closed by the replica itself. Dtype policy, numbers in names, custom
  objects, flash attention, filters of tracebacks would be a new thread's: `as_replica` copies them.
* Each replica would make a generator of unspecified seeds, an error: all share one.

Not kept apart: what a custom layer or metric writes to its attributes before a collective and reads
after it, and a `tf.function` given to `strategy.run`, which is traced in TensorFlow's threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.step import current_step, running_step

if TYPE_CHECKING:
    from keras_het.strategy.exact.keras_step import ExactStep

_Hook = Callable[[Callable[..., Any]], Callable[..., Any]]
_Verb: TypeAlias = "Callable[[ExactStep], Callable[..., Any]]"
"""What a step does instead of a function of Keras, which it gets as its first argument."""

_MISSING = object()
_local = threading.local()

# Keras 3.16 imports the function by name into a second module.
_REDUCTIONS = [
    (module, "reduce_weighted_values")
    for module in (private_api.keras_loss, private_api.keras_losses)
    if hasattr(module, "reduce_weighted_values")
]


def _step_hook(verb: _Verb, find: Callable[[], ExactStep | None] = current_step) -> _Hook:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            step = find()
            if step is None:
                return original(*args, **kwargs)
            return verb(step)(original, *args, **kwargs)

        return hooked

    return hook


def _any_step_hook(verb: _Verb) -> _Hook:
    """As `_step_hook`, also in predictions."""
    return _step_hook(verb, running_step)


def _hooks() -> list[tuple[Any, str, _Hook]]:
    loss, nn, trainer = private_api.keras_loss, private_api.keras_nn, private_api.BaseTrainer
    metrics, seeds = private_api.keras_reduction_metrics, private_api.keras_seed_generator
    layer, cell = keras.layers.Layer, private_api.DropoutRNNCell
    normalization = private_api.keras_batch_normalization.BatchNormalization
    optimizer = private_api.keras_base_optimizer.BaseOptimizer
    tf_optimizer = private_api.keras_tf_optimizer.TFOptimizer
    variable, plain_variable = private_api.KerasTensorFlowVariable, private_api.ResourceVariable
    values = private_api.distribute_values
    keep_local = _step_hook(lambda s: s.means.keep_local)
    reduce = _step_hook(lambda s: s.means.reduce)
    update_scalar = _step_hook(lambda s: s.means.update_scalar)
    of_optimizer = _hooks_of_optimizers()
    aggregate = _any_step_hook(lambda s: s.own_state.aggregate)
    assign_plain = _any_step_hook(lambda s: s.assignments.assign_plain)
    keep_losses = functools.partial(_with_own, attributes={"_losses": list})
    masks = ("_dropout_mask", "_recurrent_dropout_mask")
    keep_masks = functools.partial(_with_own, attributes=dict.fromkeys(masks, lambda: None))
    assigns = ("assign", "scatter_", "batch_scatter_", "_strided_slice_assign")
    return [
        # weights of samples
        (loss, "scale_loss_for_distribution", keep_local),
        (loss, "unscale_loss_for_distribution", keep_local),
        *[(module, name, reduce) for module, name in _REDUCTIONS],
        (loss.Loss, "__call__", _step_hook(lambda s: s.means.call_loss)),
        (trainer, "_aggregate_additional_loss", _step_hook(lambda s: s.means.sum_added)),
        (tf.GradientTape, "gradient", _step_hook(lambda s: s.means.gradient)),
        (metrics.Mean, "update_state", update_scalar),
        (metrics.Sum, "update_state", update_scalar),
        (nn, "_compute_moments_sync", _any_step_hook(lambda s: s.means.moments)),
        (normalization, "_moments", _any_step_hook(lambda s: s.means.masked_moments)),
        # gradients
        (optimizer, "scale_loss", of_optimizer["scale_loss"]),
        (optimizer, "apply", of_optimizer["apply"]),
        (tf_optimizer, "_all_reduce_sum_gradients", _step_hook(lambda s: s.gradients.keep_reduced)),
        # state
        (variable, "_direct_assign", _any_step_hook(lambda s: s.assignments.assign)),
        *[(plain_variable, n, assign_plain) for n in dir(plain_variable) if n.startswith(assigns)],
        (values, "apply_aggregation_replica_context", aggregate),
        (seeds.SeedGenerator, "next", _any_step_hook(lambda s: s.own_state.draw_seed)),
        # Python state of each replica
        (seeds, "global_seed_generator", share_seed_generator),
        (layer, "add_loss", keep_losses),
        (layer, "_get_own_losses", keep_losses),
        (layer, "_clear_losses", keep_losses),
        (cell, "get_dropout_mask", keep_masks),
        (cell, "get_recurrent_dropout_mask", keep_masks),
        (cell, "reset_dropout_mask", keep_masks),
        (cell, "reset_recurrent_dropout_mask", keep_masks),
    ]


def _hooks_of_optimizers() -> dict[str, _Hook]:
    return {
        "scale_loss": _step_hook(lambda s: s.gradients.scale_loss),
        "apply": _step_hook(lambda s: s.gradients.apply),
        "apply_gradients": _step_hook(lambda s: s.gradients.apply_gradients),
    }


def _hooks_of_subclasses() -> list[tuple[Any, str, _Hook]]:
    """Hooks for optimizers that override methods of their parents, as that of loss scales does."""
    return [
        (owner, name, hook)
        for owner in _subclasses(private_api.keras_base_optimizer.BaseOptimizer)
        for name, hook in _hooks_of_optimizers().items()
        if name in vars(owner)
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
        hook = _step_hook(functools.partial(_recording, metric))
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


def _with_own(
    original: Callable[..., Any], attributes: dict[str, Callable[[], Any]]
) -> Callable[..., Any]:
    """Give a method the attributes of its replica; no such method contains a collective."""

    @functools.wraps(original)
    def with_own(self: object, *args: object, **kwargs: object) -> Any:
        replica: _Replica | None = getattr(_local, "replica", None)
        if replica is None:
            return original(self, *args, **kwargs)
        _, own = replica.attributes.setdefault(id(self), (self, {}))
        for name, make in attributes.items():
            if name not in own:
                own[name] = make()
        # not by setattr, which would track them
        present = vars(self)
        shared = {name: present.get(name, _MISSING) for name in attributes}
        present.update({name: own[name] for name in attributes})
        try:
            return original(self, *args, **kwargs)
        finally:
            own.update({name: present.pop(name) for name in attributes})
            present.update({k: v for k, v in shared.items() if v is not _MISSING})

    return with_own


class _Replica:
    """A replica's private state while its step is traced."""

    def __init__(self, caller: dict[str, Any]) -> None:
        self.caller = caller
        # By id of the object: the object and its attributes.
        self.attributes: dict[int, tuple[object, dict[str, Any]]] = {}


@contextlib.contextmanager
def as_replica(caller: dict[str, Any]) -> Iterator[None]:
    """Keep what the running thread writes into Keras's objects apart from other replicas."""
    previous = getattr(_local, "replica", None)
    _local.replica = _Replica(caller)
    try:
        with _with_state_of(caller):
            yield
    finally:
        _local.replica = previous


def own_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a user-defined function given to `Strategy.run` run as a replica."""
    caller = private_api.keras_state_of_thread()
    converted = private_api.convert_as_called(function)

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> Any:
        with as_replica(caller):
            return converted(*args, **kwargs)

    return tf.autograph.experimental.do_not_convert(run)


@contextlib.contextmanager
def _with_state_of(caller: dict[str, Any]) -> Iterator[None]:
    own = private_api.keras_state_of_thread()
    if own is caller:  # a single replica may run in the thread of its caller
        yield
        return
    before = dict(own)
    own.clear()
    # stacks of scopes grow and shrink in each thread
    own.update({k: list(v) if isinstance(v, list) else v for k, v in caller.items()})
    try:
        yield
    finally:
        own.clear()
        own.update(before)


def share_seed_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook Keras's generator of unspecified seeds: one for all replicas of a process."""

    @functools.wraps(original)
    def global_seed_generator() -> keras.random.SeedGenerator:
        replica: _Replica | None = getattr(_local, "replica", None)
        key = private_api.GLOBAL_SEED_GENERATOR
        if replica is None:
            return original()
        own = private_api.keras_state_of_thread()
        if replica.caller.get(key) is not None:
            own[key] = replica.caller[key]
        strategy = tf.distribute.get_strategy()
        if tf.executing_eagerly() or own.get(key) is not None:
            generator = original()
        else:
            with tf.init_scope(), strategy.scope():
                generator = original()
        replica.caller[key] = generator
        return generator

    return global_seed_generator
