"""Checks the data of `fit` before it changes a weight, and compares the replicas' shards."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.callbacks.model_strategy import distribute_strategy, tell
from keras_het.callbacks.present_fit import PresentFit
from keras_het.callbacks.step_functions import functions_in

logger = logging.getLogger("keras_het")

_MOST_SHOWN = 8


class DataValidation(keras.callbacks.Callback):
    """Holds training back until its first batches are found to be what a schema says.

    The first batches of each `fit` are read ahead, compared with the schema, and then trained, in
    order. With an anomaly `fit` ends before its first step on all workers, whichever worker found
    it, and no weight has changed.

    With `compare_shards=True` the statistics of what each replica consumes are added up and
    compared at the end of each epoch: unequal shares make unequal shards. Needs TensorFlow Data
    Validation, see docs/validation.md.

    Args:
        schema: `tensorflow_metadata` schema, or the path of one; see
            `keras_het.loader.validation.infer_schema`. To compare shards it needs thresholds, see
            `keras_het.loader.validation.set_comparison_thresholds`.
        on_anomaly: "raise" ends training, "warn" writes to the log.
        first_batches: global batches that are checked, of which each worker looks at its own
            samples. A backup that is made within these steps would leave some out.
        compare_shards: whether to compare what the replicas consume. It costs time in each step.
        directory: where the chief writes each epoch's statistics of all replicas, as files that
            `keras-het validate` reads; needs `compare_shards`.
        features: makes named features of a batch, by default
            `keras_het.loader.validation.features_of_batch`. Sample weights of which the schema
            knows nothing are then left out: `fit` makes some of `class_weight`.
        environment: environment of the schema, such as "TRAINING", if it has some.
        verbose: 1 prints on the chief what was checked and compared, also if nothing was found.

    Attributes:
        anomalies: what was found in this worker's first batches.
        distances: for each epoch that was compared the skew between the replicas' shards, greatest
            excess over its threshold first.
        drift: the same for the drift of each replica's shard since the epoch before.

    Raises:
        ImportError: if TensorFlow Data Validation is not installed.
        ValueError: if an argument is none of the above.
        keras_het.loader.validation.DataAnomalyError: by `fit`, if there are anomalies.
    """

    def __init__(
        self,
        schema: Any,
        on_anomaly: str = "raise",
        *,
        first_batches: int = 4,
        compare_shards: bool = False,
        directory: str | Path | None = None,
        features: Callable[[Any], Mapping[str, Any]] | None = None,
        environment: str | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        # Elsewhere keras_het.callbacks is of use without TensorFlow Data Validation.
        self._tools: Any = importlib.import_module("keras_het.loader.validation")
        _check_arguments(on_anomaly, first_batches, compare_shards, directory)
        self._schema = (
            self._tools.read_schema(schema) if isinstance(schema, (str, Path)) else schema
        )
        self._kinds = _comparators(self._schema)
        if compare_shards and "skew" not in self._kinds:
            raise ValueError(
                "compare_shards needs thresholds in the schema. Call "
                "keras_het.loader.validation.set_comparison_thresholds(schema) first."
            )
        self._on_anomaly = on_anomaly
        self._first_batches = first_batches
        self._compare_shards = compare_shards
        self._directory = Path(directory) if directory is not None else None
        self._features = features or self._known_features
        self._environment = environment
        self._verbose = verbose
        self.anomalies: list[Any] = []
        self.distances: list[list[Any]] = []
        self.drift: list[list[Any]] = []
        self._shards: Any = None
        self._previous: dict[int, Any] = {}
        self._wrapper: _FirstBatches | None = None
        self._function: Any = None
        self._fit: PresentFit | None = None
        self._waiting: list[Any] = []
        self._is_checked = True
        self._is_observed = False

    def on_train_begin(self, logs: Any = None) -> None:
        """The next batches are the first ones."""
        self.let_go()
        self.anomalies, self._is_checked = [], False
        self._fit = PresentFit(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to look at the data."""
        self._shards = self._new_shards() if self._compare_shards else None
        # Not earlier: the functions of other callbacks, which may change the input, come below.
        self._enter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Looks at the data still, if another callback has replaced the train function."""
        self._is_observed = False
        self._enter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Checks that the data was seen."""
        if not self._is_checked or (self._compare_shards and not self._is_observed):
            missed = "compared" if self._is_checked else "checked"
            raise RuntimeError(
                f"A batch was trained that was not {missed}: another callback has replaced the "
                "model's train function. Put DataValidation last among the callbacks."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the shards of the epoch."""
        shards, self._shards = self._shards, None
        if shards is not None:
            self._compare(epoch, shards.gather())

    def on_train_end(self, logs: Any = None) -> None:
        """Leaves Keras as it was."""
        self.let_go()

    def let_go(self) -> None:
        """Sees no more batches, and leaves Keras as it was."""
        self.leave()
        self._shards, self._waiting = None, []

    def _enter(self) -> None:
        """Puts the function that shows the batches around the model's, unless it is there."""
        if self._fit is not None:
            self._fit.begin_epoch()
        function = self.model.train_function
        is_in = self._wrapper is not None and (
            function is self._function  # seen before: this is called in every step
            or any(each is self._wrapper for each in functions_in(function))
        )
        if not is_in:
            self.leave()
            self._wrapper = _FirstBatches(self, self.model.train_function)
            self.model.train_function = self._wrapper
        self._function = self.model.train_function

    # --- what the train function calls

    def leave(self) -> None:
        """Takes its function out of the model's steps."""
        wrapper, self._wrapper, self._function = self._wrapper, None, None
        if wrapper is not None:
            # If a function of somebody else is around it, it stays there and does nothing.
            wrapper.is_active = False
            if self.model.train_function is wrapper:
                self.model.train_function = wrapper.original

    def take_batches(self, iterator: Any) -> list[Any]:
        """The batches of the next execution, if it begins with some that were read ahead.

        Args:
            iterator: of the epoch.

        Returns:
            The batches; none if the iterator is to be read as usual.
        """
        # Kept here, not in the function, of which there may be another one in the next step.
        self._waiting += self.first_batches(iterator)
        if not self._waiting:
            return []
        steps = self.model.steps_per_execution
        batches, self._waiting = self._waiting[:steps], self._waiting[steps:]
        return batches + _some(iterator, steps - len(batches))

    def begin_execution(self) -> None:
        """Takes note that the batches of the present step are seen."""
        self._is_observed = True

    def first_batches(self, iterator: Any) -> list[Any]:
        """Reads the first batches and checks them, once in each training.

        Args:
            iterator: of the first epoch.

        Returns:
            The batches, which are still to be trained.
        """
        if self._is_checked:
            return []
        self._is_checked = True
        batches: list[Any] = []
        shards = self._new_shards()
        try:
            while len(batches) < self._first_batches:
                batches.append(next(iterator))
                shards.observe(batches[-1])
        except (StopIteration, tf.errors.OutOfRangeError):
            pass  # an epoch of fewer batches
        try:
            self._check(shards)
        except self._tools.DataAnomalyError:
            self.let_go()
            raise
        return batches

    def observe(self, batch: Any) -> None:
        """Adds a batch that is about to be trained to the replicas' shards.

        Args:
            batch: the global batch.
        """
        if self._shards is not None:
            self._shards.observe(batch)

    @property
    def is_training(self) -> bool:
        """Whether the training that began last is still the model's: it may end in an error."""
        return self._fit is not None and self._fit.is_running

    @property
    def observes_all(self) -> bool:
        """Whether every batch has to be seen, not only the first ones."""
        return self._compare_shards

    def _new_shards(self) -> Any:
        strategy = distribute_strategy(self.model)
        return self._tools.ShardStatistics(strategy, schema=self._schema, features=self._features)

    def _known_features(self, batch: Any) -> Mapping[str, Any]:
        is_weighted = isinstance(batch, (tuple, list)) and len(batch) == 3
        if is_weighted and not _knows_weights(self._schema):
            batch = batch[:2]
        features: Mapping[str, Any] = self._tools.features_of_batch(batch)
        return features

    # --- what was found

    def _check(self, shards: Any) -> None:
        found: dict[str, Any] = {}
        for statistics in shards.finish().values():
            if statistics.datasets[0].num_examples:
                for anomaly in self._tools.find_anomalies(
                    statistics, self._schema, self._environment
                ):
                    found.setdefault(str(anomaly), anomaly)
        self.anomalies = list(found.values())
        affected = self._workers_with_anomalies()
        if not affected:
            message = f"Data validation: no anomaly in the first {self._first_batches} batch(es)."
            tell(message, distribute_strategy(self.model), self._verbose)
            return
        message = self._describe(affected)
        if self._on_anomaly == "raise":
            raise self._tools.DataAnomalyError(message, self.anomalies)
        if self.anomalies:
            logger.warning("%s", message)

    def _workers_with_anomalies(self) -> list[int]:
        flag = np.array([len(self.anomalies)], np.int64)
        strategy = distribute_strategy(self.model)
        if getattr(strategy, "num_workers", 1) > 1:
            flag = strategy.extended.gather_over_workers(flag)
        return [int(worker) for worker in np.flatnonzero(flag)]

    def _describe(self, affected: list[int]) -> str:
        head = (
            f"The first {self._first_batches} batch(es) are not what the schema says, on worker(s) "
            f"{affected}."
        )
        shown = [f"\n  {anomaly}" for anomaly in self.anomalies[:_MOST_SHOWN]]
        if len(self.anomalies) > _MOST_SHOWN:
            shown.append(f"\n  and {len(self.anomalies) - _MOST_SHOWN} more")
        if not shown:
            shown = [" This worker's samples are right; see the output of the others."]
        tail = (
            "\nNo weight has changed. Correct the data, or the schema if the data is right."
            if self._on_anomaly == "raise"
            else ""
        )
        return head + "".join(shown) + tail

    def _compare(self, epoch: int, replicas: dict[int, Any]) -> None:
        shards = {f"replica {replica}": shard for replica, shard in replicas.items()}
        distances = self._tools.compare_shards(shards, self._schema) if _any_rows(shards) else []
        drift = self._measure_drift(replicas)
        self.distances.append(distances)
        self.drift.append(drift)
        self._previous = replicas
        if not getattr(distribute_strategy(self.model), "is_chief", True):
            return
        exceeded = [distance for distance in (*distances, *drift) if distance.is_exceeded]
        message = (
            f"Data validation, epoch {epoch + 1}: {len(exceeded)} of {len(distances) + len(drift)} "
            "distances between shards are above their thresholds."
        )
        tell(message, distribute_strategy(self.model), self._verbose)
        if exceeded:
            lines = "".join(f"\n  {distance}" for distance in exceeded[:_MOST_SHOWN])
            logger.warning("Epoch %d: the shards of the replicas differ.%s", epoch + 1, lines)
        self._write(epoch, replicas)

    def _measure_drift(self, replicas: dict[int, Any]) -> list[Any]:
        if "drift" not in self._kinds:
            return []
        drift = [
            distance
            for replica, shard in replicas.items()
            if replica in self._previous
            and shard.datasets[0].num_examples
            and self._previous[replica].datasets[0].num_examples
            for distance in self._tools.measure_drift(
                shard,
                self._previous[replica],
                self._schema,
                name=f"replica {replica}",
                previous_name="the epoch before",
            )
        ]
        return sorted(drift, key=lambda distance: distance.threshold - distance.value)

    def _write(self, epoch: int, replicas: dict[int, Any]) -> None:
        if self._directory is None:
            return
        # an earlier training's would pass for replicas, or for later epochs, of this one
        for old in self._directory.glob("epoch-*-replica-*.stats"):
            number = old.name.split("-")[1]
            if number.isdecimal() and int(number) > epoch:
                old.unlink(missing_ok=True)
        for replica, statistics in replicas.items():
            name = f"epoch-{epoch + 1:04d}-replica-{replica}.stats"
            self._tools.write_statistics(statistics, self._directory / name)


class _FirstBatches:
    """A train function that shows its batches to the callback before it trains them.

    Args:
        callback: the `DataValidation`.
        original: the model's train function.

    Attributes:
        original: the model's train function.
        is_active: whether the callback still wants to see batches.
        stays_outermost: what other callbacks put there later comes below.
    """

    stays_outermost = True

    def __init__(self, callback: DataValidation, original: Any) -> None:
        self._callback = callback
        self.original = original
        self.is_active = True

    def __call__(self, iterator: Any) -> Any:
        if self.is_active and not self._callback.is_training:
            # A fit that ended in an error left this, or another callback has called fit: what was
            # read ahead, and the shards, are not of its batches.
            self._callback.leave()
        if not self.is_active:
            return self.original(iterator)
        self._callback.begin_execution()
        batches = self._callback.take_batches(iterator)
        if batches:
            for batch in batches:
                self._callback.observe(batch)
            return self.original(batches)
        if self._callback.observes_all:
            return self.original(_Observed(iterator, self._callback))
        return self.original(iterator)


class _Observed:
    """Passes for an iterator in one execution, and shows each of its elements.

    Args:
        iterator: the iterator.
        callback: the `DataValidation`.

    Attributes:
        why_path_stays: why `LoaderTuner` changes nothing behind it.
    """

    why_path_stays = "DataValidation(compare_shards=True) looks at every batch on its way"

    def __init__(self, iterator: Any, callback: DataValidation) -> None:
        self._given = iterator
        self._callback = callback
        self._iterator: Any = None
        self._is_empty = True

    def __iter__(self) -> _Observed:
        self._iterator = iter(self._given)
        return self

    def __next__(self) -> Any:
        try:
            element = next(self._iterator)
        except StopIteration:
            if self._is_empty:
                # After StopIteration Keras would go on to use a result that it does not have.
                raise tf.errors.OutOfRangeError(None, None, "End of the data.") from None
            raise
        self._is_empty = False
        self._callback.observe(element)
        return element


def _some(iterator: Any, count: int) -> list[Any]:
    batches: list[Any] = []
    try:
        while len(batches) < count:
            batches.append(next(iterator))
    except (StopIteration, tf.errors.OutOfRangeError):
        pass  # the end of the epoch
    return batches


def _any_rows(shards: Mapping[str, Any]) -> bool:
    return any(shard.datasets[0].num_examples for shard in shards.values())


def _knows_weights(schema: Any) -> bool:
    return any(feature.name.split("/")[0] == "sample_weight" for feature in schema.feature)


def _comparators(schema: Any) -> set[str]:
    if not hasattr(schema, "feature"):
        raise ValueError(
            "schema must be a tensorflow_metadata schema or the path of one, as "
            f"keras_het.loader.validation.infer_schema makes it. Received: {schema!r}."
        )
    return {
        kind
        for kind in ("skew", "drift")
        for feature in schema.feature
        if feature.HasField(f"{kind}_comparator")
    }


def _check_arguments(
    on_anomaly: str, first_batches: int, compare_shards: bool, directory: Any
) -> None:
    if on_anomaly not in ("raise", "warn"):
        raise ValueError(f'on_anomaly must be "raise" or "warn". Received: {on_anomaly!r}.')
    if first_batches < 1:
        raise ValueError(f"first_batches must be at least 1. Received: {first_batches}.")
    if directory is not None and not compare_shards:
        raise ValueError(
            "directory is for the statistics of the replicas' shards. Give compare_shards=True too."
        )
