"""Agreement of all workers on calls of Keras's `fit`, `evaluate` and `predict`.

They begin, and `fit` continues, only as all workers agreed. Installed when a strategy is created;
models of other strategies are not affected.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_het.fit.model_strategy import complete
from keras_het.strategy.batches.gathered_rows import refusal_in
from keras_het.strategy.cluster.agreement import pass_on
from keras_het.strategy.cluster.peer_watch import message_in
from keras_het.strategy.described_call import (
    describe_call,
    trains_locally,
    weights_in_short,
    workers_with_other_weights,
)
from keras_het.strategy.exact.created_in_scope import move_optimizer
from keras_het.training_strategy import TrainingStrategy

_LOOPS = ("fit", "evaluate", "predict")
# Compared in the first call only: later calls may be as short as a step.
_ON_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")
_TRAINING = ("fit", "train_on_batch")
_clusters: weakref.WeakSet[TrainingStrategy] = weakref.WeakSet()
_called: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()


def install_agreement(strategy: TrainingStrategy) -> None:
    """Make calls of this strategy's models agree; other models keep Keras's own calls."""
    trains_together = strategy.num_workers > 1 or strategy.num_async_workers
    if trains_together and not getattr(strategy.cluster_config, "is_evaluator", False):
        _clusters.add(strategy)
    for name in (*_LOOPS, *_ON_BATCHES):
        original = getattr(keras.Model, name)
        if not hasattr(original, "agrees"):
            setattr(keras.Model, name, _agreed(original, name))


def _agreed(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def agreed_call(self: keras.Model, *args: object, **kwargs: object) -> Any:
        strategy: TrainingStrategy = getattr(self, "distribute_strategy", None)  # type: ignore[assignment]
        if name in _TRAINING:
            _check_was_made_in_scope(self, name)
        if not hasattr(strategy, "agree"):
            return original(self, *args, **kwargs)
        if getattr(self, "_distribute_strategy", None) is strategy:
            move_optimizer(strategy, self)
        is_first = name not in _called.setdefault(self, set())
        call = strategy._name_lost_workers(original)
        if name in _ON_BATCHES and not is_first:
            return call(self, *args, **kwargs)
        _called[self].add(name)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # Keras's own message is better
            return original(self, *args, **kwargs)
        bound.apply_defaults()
        given = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        del given["self"]
        if strategy.num_workers > 1 and not given.get("_use_cached_eval_dataset"):
            _agree(strategy, self, name, given)
            if name == "fit":
                bound.arguments["callbacks"] = _with_step_watch(self, given["callbacks"])
                args, kwargs = bound.args[1:], bound.kwargs
        try:
            return call(self, *args, **kwargs)
        except StopIteration:
            raise ValueError(
                f"The data set is empty: model.{name} got no batch. Expected at least one. Look "
                "for a filter that keeps nothing, a wrong file pattern, and "
                "batch(..., drop_remainder=True) with fewer samples than a batch."
            ) from None
        except Exception as error:
            message = message_in(error) or refusal_in(error)
            if message is None or isinstance(error, ValueError):
                raise
            # TensorFlow's error surrounds it with pages of graph nodes.
            pass_on(message)

    agreed_call.agrees = True  # type: ignore[attr-defined]
    return agreed_call


def _check_was_made_in_scope(model: keras.Model, name: str) -> None:
    if getattr(model, "_distribute_strategy", None) is not None:
        return
    for cluster in _clusters:
        raise ValueError(
            f"Every worker would train this model by itself. Received: model.{name} of a model "
            "that was created outside of strategy.scope(), in a process that belongs to a cluster "
            f"of {cluster.num_workers + cluster.num_async_workers} workers. Create or load it in "
            "`with strategy.scope():`. A model that each worker is to train for itself is created "
            'in `with tf.distribute.OneDeviceStrategy("CPU:0").scope():` (or "GPU:0").'
        )


def _agree(
    strategy: TrainingStrategy, model: keras.Model, name: str, given: dict[str, Any]
) -> None:
    complete(model, name)  # a training that failed has left its parts on the workers
    described = describe_call(model, given)
    weights = [weight / sum(strategy.shares) for weight in strategy.shares]
    described["shares"] = str([float(f"{weight:.4g}") for weight in weights])
    # After a failed local training, steps start from the chief's weights, whatever comes next.
    is_left_local = name == "fit" and hasattr(model.train_function, "adopts_the_chiefs")
    may_differ = is_left_local or trains_locally(given.get("callbacks"))
    if may_differ:
        described.pop("steps trained before", None)
    everyone = strategy.agree(
        f"model.{name}",
        described,
        opening=f"The workers do not agree on model.{name}",
        advice="Run the same script with the same data, all of it, on every worker.",
        notes=weights_in_short(model),
    )
    others = [] if may_differ else workers_with_other_weights(everyone)
    if others:
        raise ValueError(
            f"The workers' models have different weights: those of worker(s) {list(others)} are "
            f"not the chief's, where model.{name} begins. Load or set weights on every worker, and "
            "create the model in strategy.scope()."
        )


def _with_step_watch(
    model: keras.Model, callbacks: object
) -> keras.callbacks.CallbackList | list[keras.callbacks.Callback]:
    watch = _StepWatch()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        watch.set_model(model)
        callbacks.append(watch)
        return callbacks
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    return [*(callback for callback in given if callback is not None), watch]


class _StepWatch(keras.callbacks.Callback):
    """Last callback of a `fit`, which ends the training when one worker alone stops it."""

    _epoch = 0
    _batches = 0
    _trains = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batches, self._trains = epoch, 0, True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches = batch + 1
        if self.model.stop_training:
            self._agree(is_early=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._trains and self.model.stop_training:
            self._agree(is_early=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree(is_early=bool(self.model.stop_training))
        self._trains = False

    def _agree(self, is_early: bool) -> None:
        stops = bool(self.model.stop_training)
        epoch, batches = self._epoch + 1, self._batches
        where = f"batch {batches} of epoch {epoch}"
        strategy = self.model.distribute_strategy
        strategy.agree(
            "the end of an epoch",
            {"steps": f"{batches} of epoch {epoch}", "model.stop_training": str(stops)},
            opening="The workers do not train on together",
            advice=(
                "Stop training on all workers after the same step: decide from what all of them "
                "know, such as the logs, not from a clock, a signal or a file of one machine."
            ),
            leaves_loop=(
                f"The workers do not train on together: worker {strategy.worker_index} has stopped "
                f"at {where} (model.stop_training is set), and others go on. Stop training on all "
                "workers after the same step: decide from what all of them know, such as the logs, "
                "not from a clock, a signal or a file of one machine."
            )
            if is_early
            else None,
        )
