"""Python state of Keras that the replicas of one process would share, or would miss.

Replicas of one process are threads that take turns: another one continues at each collective, in
the forward pass too (`BatchNormalization(synchronized=True)`, a loss whose divisor is summed). What
a replica writes before its turn ends and reads when it continues must be its own; what Keras keeps
per thread must be that of the thread that called `fit`. Found in Keras 3.8 to 3.15, by checking all
assignments to attributes outside of `__init__` and `build`, and all of `global_state`:

* `Layer._losses` and the two masks of a `DropoutRNNCell` would be mixed: each replica has its own.
* `_called`, `built`, `_parent_path`, `supports_jit`, `_return_attention_scores`, the caches of
  optimizers, what `CompileLoss` and `CompileMetrics` build: each replica writes the same, or reads
  it before its turn ends. So are `activation` of a layer that is recomputed and
  `_convert_input_args` of a `DataLayer`. TensorFlow's steps do not use `_loss_ids` and
  `_losses_override`.
* Tensors (`_keras_mask`) and variables are each replica's own; `own_state` and `metrics` combine
  the variables.
* Call context, name scopes, autocast, stateless and symbolic scopes: opened and closed by the
  replica itself. Dtype policy, numbers in names, custom objects, flash attention, the filter of
  tracebacks would be those of a new thread: `as_replica` copies them.
* Each replica would make a generator of unspecified seeds, an error: all share one.

This holds for Keras's steps and for user-defined functions in `strategy.run`, except for a
`tf.function` given to it, which is traced in TensorFlow's threads. Not kept apart: what a custom
layer or metric writes to its attributes before a collective and reads after it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api

_MISSING = object()
_local = threading.local()


def keep_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook a layer's methods that write and read its list of losses: one list per replica."""
    return _with_own(original, {"_losses": list})


def keep_masks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook a recurrent cell's methods that create, return and drop its dropout masks."""
    return _with_own(
        original, dict.fromkeys(("_dropout_mask", "_recurrent_dropout_mask"), lambda: None)
    )


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
