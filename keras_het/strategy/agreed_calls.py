"""Agreement of all workers on a call of `fit` and the like, and on the end of each epoch."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.ignored_errors import ignore_errors
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.loader.order.content import sample_of
from keras_het.strategy.cluster.agreement import flat
from keras_het.strategy.drift import DriftWatch

if TYPE_CHECKING:
    from keras_het.strategy.keras_calls import Call

_DATA = ("x", "y", "sample_weight", "validation_data")
# Arguments that a worker may choose by itself.
_WORKS_ALONE = ("LoaderTuner",)
_OWN = ("verbose", "callbacks", "return_dict", "kwargs")
_MOST_SAMPLED = 4
_MOST_READ = 1_000_000
# Rounding differs between devices; a different initial value is off by more than a hundredth.
_TOLERANCE = 0.01
_STOP_TOGETHER = (
    "Stop training on all workers after the same step: decide from what all of them know, such as "
    "the logs, not from a clock, a signal or a file of one machine."
)
_compared: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()


def agree_on_call(call: Call, is_short: bool) -> None:
    """Compare a call with the other workers' calls; of calls as short as a step, the first."""
    strategy, model, name, given = call.strategy, call.model, call.name, call.given
    compared = _compared.setdefault(model, set())
    if given.get("_use_cached_eval_dataset") or (is_short and name in compared):
        return
    compared.add(name)
    strategy._complete(model, name)  # a training that failed has left its parts on the workers
    together = [
        callback
        for callback in call.callbacks
        if type(callback).__module__.startswith("keras_het.")
        and type(callback).__name__ not in _WORKS_ALONE
    ]
    described = _described(model, given, together)
    weights = [weight / sum(strategy.share_weights) for weight in strategy.share_weights]
    described["shares"] = str([float(f"{weight:.4g}") for weight in weights])
    # Local training starts from the chief's weights, and so does what comes after a failed one.
    is_left_local = name == "fit" and hasattr(model.train_function, "adopts_the_chiefs")
    is_local = any(type(callback).__name__ == "LocalTraining" for callback in together)
    may_differ = is_left_local or is_local
    if may_differ:
        described.pop("steps trained before", None)
    everyone = strategy.extended.agree(
        f"model.{name}",
        described,
        opening=f"The workers do not agree on model.{name}",
        advice="Run the same script with the same data, all of it, on every worker.",
        notes=_weights_in_short(model),
    )
    others = [] if may_differ else _workers_with_other_weights(everyone)
    if others:
        raise ValueError(
            f"The workers' models have different weights: those of worker(s) {list(others)} are "
            f"not the chief's, where model.{name} begins. Load or set weights on every worker, and "
            "create the model in strategy.scope()."
        )


class StepWatch(DriftWatch):
    """Last callback of a `fit` on several workers, which ends it when one of them alone stops."""

    _epoch = 0
    _batches = 0
    _trains = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batches, self._trains = epoch, 0, True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.distribute_strategy.extended.is_between_steps = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree if training stops within an epoch."""
        self.model.distribute_strategy.extended.is_between_steps = False
        self._batches = batch + 1
        if self.model.stop_training:
            self._agree(is_early=True)

    on_test_batch_begin = on_train_batch_begin

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.distribute_strategy.extended.is_between_steps = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agree if training has been stopped before the validation."""
        if self._trains and self.model.stop_training:
            self._agree(is_early=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._trains = False

    def _meet(self, notes: Sequence[int]) -> np.ndarray:
        return self._agree(is_early=bool(self.model.stop_training), notes=notes)

    def _agree(self, is_early: bool, notes: Sequence[int] = ()) -> np.ndarray:
        stops = bool(self.model.stop_training)
        epoch, batches = self._epoch + 1, self._batches
        where = f"batch {batches} of epoch {epoch}"
        strategy = self.model.distribute_strategy
        everyone: np.ndarray = strategy.extended.agree(
            "the end of an epoch",
            {"steps": f"{batches} of epoch {epoch}", "model.stop_training": str(stops)},
            opening="The workers stopped at different steps",
            advice=_STOP_TOGETHER,
            leaves_loop=(
                f"The workers stopped at different steps: worker {strategy.worker_index} has "
                f"stopped at {where} (model.stop_training is set), and others continue. "
                f"{_STOP_TOGETHER}"
            )
            if is_early
            else None,
            notes=notes,
        )
        return everyone


def _described(
    model: keras.Model,
    arguments: Mapping[str, Any],
    together: Sequence[keras.callbacks.Callback],
) -> dict[str, str]:
    plain = {
        name: value
        for name, value in arguments.items()
        if name not in (*_DATA, *_OWN) and not name.startswith("_")
    }
    parts: list[tuple[str, str]] = []
    for name, value in plain.items():
        parts += flat(name.replace("_", " "), value)
    for name in _DATA:
        parts += _data(name, arguments.get(name))
    parts += _compiled(model)
    parts += _architecture(model)
    names = [type(callback).__name__ for callback in together]
    parts.append(("callbacks that work together", str(names)))
    for callback in together:
        parts += _settings(callback)
    return dict(parts)


def _settings(callback: keras.callbacks.Callback) -> Iterator[tuple[str, str]]:
    """A callback's arguments, if it keeps them under their names."""
    kind = type(callback).__name__
    for name in inspect.signature(type(callback)).parameters:
        kept = [f"_given_{name}", f"_{name}"]
        value = next((getattr(callback, each) for each in kept if hasattr(callback, each)), None)
        if name != "verbose" and _is_plain(value):
            yield from flat(f"{kind}.{name}", value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return isinstance(value, (str, int, float, bool))


def _data(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if value is None:
        return
    if isinstance(value, (DistributedSteps, tf.data.Dataset)):
        yield f"kind of {name}", "dataset"
        yield f"batches of {name}", _cardinality(value)
        for path, spec in _leaves(name, value.element_spec):
            yield f"elements of {path}", str(spec)
    elif isinstance(value, tf.distribute.DistributedDataset):
        yield f"kind of {name}", "dataset of each replica's own batches"
    elif hasattr(value, "num_batches") or type(value).__module__.startswith("torch.utils.data"):
        yield f"kind of {name}", type(value).__name__
        size = getattr(value, "num_batches", None)
        yield f"batches of {name}", str(size if size is not None else len(value))
    elif hasattr(value, "__next__"):
        yield f"kind of {name}", "generator"
    else:
        for path, array in _leaves(name, value):
            shape = [int(n) if n is not None else None for n in getattr(array, "shape", ())]
            yield f"kind of {path}", "array"
            yield f"rows of {path}", str(shape[0] if shape else "none")
            yield f"type of {path}", f"{_dtype(array)} {shape[1:]}"
            yield f"some rows of {path}", sample_of(array)


def _cardinality(dataset: DistributedSteps | tf.data.Dataset) -> str:
    size = dataset.cardinality
    number = int(size() if callable(size) else size)
    named = {tf.data.INFINITE_CARDINALITY: "infinite", tf.data.UNKNOWN_CARDINALITY: "unknown"}
    return named.get(number, str(number))


def _leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)) and any(
        hasattr(each, "shape") or isinstance(each, (list, tuple, Mapping)) for each in value
    ):
        for position, each in enumerate(value):
            yield from _leaves(f"{name}[{position}]", each)
    elif value is not None:
        is_array = hasattr(value, "shape")
        yield name, value if is_array or not isinstance(value, (list, tuple)) else np.asarray(value)


def _dtype(array: object) -> str:
    dtype = getattr(array, "dtype", None)
    return str(getattr(dtype, "name", dtype))


def _compiled(model: keras.Model) -> Iterator[tuple[str, str]]:
    config: dict[str, Any] = {}
    with ignore_errors("describing a model"):  # whatever a user-defined class raises
        config = model.get_compile_config() or {}
    for name, value in config.items():
        yield from flat(str(name).replace("_", " "), value)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        yield "optimizer", type(optimizer).__name__
        yield "steps trained before", str(int(np.asarray(optimizer.iterations)))


def _architecture(model: keras.Model) -> Iterator[tuple[str, str]]:
    yield "model", type(model).__name__
    for number, layer in enumerate(_layers(model)):
        kind = type(layer).__name__
        yield f"layer {number}", kind
        if hasattr(layer, "layers"):
            continue
        config: dict[str, Any] = {}
        with ignore_errors("describing a layer"):
            config = layer.get_config()
        yield from flat(f"layer {number} ({kind})", config)
    if model.built:
        yield "number of weights", str(len(model.weights))
        for number, weight in enumerate(model.weights):
            kind = "trainable" if weight.trainable else "not trainable"
            yield f"weight {number}", f"{_dtype(weight)} {list(weight.shape)}, {kind}"


def _layers(model: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers(layer)


def _weights_in_short(model: keras.Model) -> list[int]:
    """Four numbers that tell one set of weights from another, up to rounding."""
    # the norm of some of the elements, and three sums of them with random signs, float64
    if not model.built or not model.weights:
        return [0] * 4
    parts = [_some(weight) for weight in model.weights]
    values = np.concatenate(parts) if parts else np.zeros([0])
    signs = np.random.default_rng(7).choice([-1.0, 1.0], size=(3, len(values)))
    numbers = np.array([np.linalg.norm(values), *(signs @ values)], np.float64)
    return [int(number) for number in numbers.view(np.int64)]


def _some(weight: keras.Variable) -> np.ndarray:
    dtype = tf.as_dtype(weight.dtype)
    if not (dtype.is_floating or dtype.is_integer):
        return np.zeros([0])
    value = tf.convert_to_tensor(weight.value)
    if math.prod(weight.shape) > _MOST_READ:  # reading a small one is faster than slicing it
        value = tf.reshape(value, [-1])
        value = tf.concat([value[:_MOST_SAMPLED], value[-_MOST_SAMPLED:]], 0)
    flat_value = np.asarray(value).reshape(-1)
    ends = (flat_value[:_MOST_SAMPLED], flat_value[-_MOST_SAMPLED:])
    return np.concatenate(ends).astype(np.float64)


def _workers_with_other_weights(everyone: np.ndarray) -> Sequence[int]:
    numbers = np.ascontiguousarray(everyone).view(np.float64)
    norms = np.maximum(np.abs(numbers[:, 0]), np.abs(numbers[0, 0]))
    difference = np.abs(numbers - numbers[0]).max(axis=1)
    # except when both are NaN, which is a different kind of fault
    other = difference > _TOLERANCE * norms
    other |= np.isnan(numbers).any(axis=1) != np.isnan(numbers[0]).any()
    return [int(worker) for worker in np.flatnonzero(other)]
