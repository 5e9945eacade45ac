"""Check the data of `fit` before it changes a weight, and compare the replicas' shards."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_het.fit.model_strategy import distribute_strategy, tell
from keras_het.fit.session import FitSession, Rank, StepFunction
from keras_het.loader.iterators.live_iterator import MeteredIterator
from keras_het.planning.argument_checks import (
    check_flag,
    check_folder,
    check_number,
    check_one_of,
    check_verbose,
    expect,
)
from keras_het.stability import experimental
from keras_het.strategy.keras_calls import SessionCallback

if TYPE_CHECKING:
    from keras_het.loader.nested import Batch, Rows, StepInput
    from keras_het.loader.validation import Anomaly, ShardDistance, ShardStatistics
    from keras_het.loader.validation.tfdv_adapter import Schema, Statistics

_logger = logging.getLogger(__name__)

_MOST_SHOWN = 8


@experimental
class DataValidation(SessionCallback):
    """Callback that delays training until its first batches are found to match a schema.

    The first batches of each `fit` are read ahead, compared with the schema, and then trained in
    order. On an anomaly, `fit` ends before its first step on all workers, whichever worker finds
    it, and no weight changes.

    With `compare_shards=True`, the statistics of each replica's consumed data are accumulated and
    compared at the end of each epoch: unequal shares make unequal shards. Requires TensorFlow Data
    Validation.

    Args:
        schema: `tensorflow_metadata` schema, or its path; see
            `keras_het.loader.validation.infer_schema`. Comparing shards needs thresholds, see
            `keras_het.loader.validation.set_comparison_thresholds`.
        on_anomaly: "raise" ends training, "warn" writes to the log.
        num_batches_to_check: number of global batches to check; each worker checks its own samples.
            A backup made within these steps would skip some of them.
        compare_shards: whether to compare the replicas' consumed data. This costs time in each
            step.
        directory: directory to which the chief writes each epoch's statistics of all replicas, as
            files that `keras-het validate` reads; needs `compare_shards`.
        features: converts a batch to named features, by default
            `keras_het.loader.validation.features_of_batch`. The default omits sample weights
            unknown to the schema, because `fit` creates them from `class_weight`.
        schema_environment: environment of the schema, such as "TRAINING", if it defines any.
        verbose: 1 prints the checks and comparisons on the chief, even without findings.

    Attributes:
        anomalies: anomalies found in this worker's first batches.
        distances: for each compared epoch, the skew between the replicas' shards, sorted by excess
            over the threshold, greatest first.

    Raises:
        ImportError: if TensorFlow Data Validation is not installed.
        ValueError: if an argument is out of range, or needs another one that is missing.
        keras_het.loader.validation.DataAnomalyError: by `fit`, if there are anomalies.
    """

    def __init__(
        self,
        schema: Schema | str | Path,
        on_anomaly: str = "raise",
        *,
        num_batches_to_check: int = 4,
        compare_shards: bool = False,
        directory: str | Path | None = None,
        features: Callable[[Any], Mapping[str, Any]] | None = None,
        schema_environment: str | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        check_one_of("on_anomaly", on_anomaly, ("raise", "warn"))
        check_number("num_batches_to_check", num_batches_to_check, least=1, whole=True)
        check_flag("compare_shards", compare_shards)
        check_folder("directory", directory, or_none=True)
        expect(features is None or callable(features), "a function of a batch", features=features)
        is_name = schema_environment is None or (
            isinstance(schema_environment, str) and schema_environment != ""
        )
        expect(
            is_name,
            "the name of an environment in the schema",
            schema_environment=schema_environment,
        )
        check_verbose(verbose)
        is_schema = isinstance(schema, (str, Path)) or hasattr(schema, "feature")
        expected = (
            "a tensorflow_metadata schema or the path of one, as "
            "keras_het.loader.validation.infer_schema makes it"
        )
        expect(is_schema and schema != "", expected, schema=schema)
        # keras_het.callbacks remains useful without TensorFlow Data Validation.
        self._tools = importlib.import_module("keras_het.loader.validation")
        if directory is not None and not compare_shards:
            raise ValueError(
                "directory is for the statistics of the replicas' shards. Give compare_shards=True "
                "too."
            )
        self._schema = (
            self._tools.read_schema(schema) if isinstance(schema, (str, Path)) else schema
        )
        names = [each.name for each in self._schema.feature]
        self._knows_weights = any(name.split("/")[0] == "sample_weight" for name in names)
        if compare_shards and not any(
            each.HasField("skew_comparator") for each in self._schema.feature
        ):
            raise ValueError(
                "compare_shards needs thresholds in the schema. Call "
                "keras_het.loader.validation.set_comparison_thresholds(schema) first."
            )
        self._on_anomaly = on_anomaly
        self._first_batches = num_batches_to_check
        self._compare_shards = compare_shards
        self._directory = Path(directory) if directory is not None else None
        self._features = features or self._known_features
        self._environment = schema_environment
        self._verbose = verbose
        self.anomalies: list[Anomaly] = []
        self.distances: list[list[ShardDistance]] = []
        self._shards: ShardStatistics | None = None
        self._waiting: list[StepInput] = []
        self._is_checked = True

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self._forget()
        self.anomalies, self._is_checked = [], False
        fit = self._fit_session
        if fit is not None:
            fit.add_layer(Rank.VALIDATE_DATA, functools.partial(self._step, fit))
            fit.on_end(self._forget)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self._shards = self._new_shards() if self._compare_shards else None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            self._compare(epoch, shards.gather())

    def _forget(self) -> None:
        self._is_checked, self._shards, self._waiting = True, None, []

    # --- the layer around the steps

    def _step(self, fit: FitSession, step: StepFunction, iterator: Iterator[StepInput]) -> object:
        if not self._is_checked:
            self._is_checked = True
            self._waiting = _some(iterator, self._first_batches)
            self._check(self._waiting)
        if not self._waiting:
            is_observed = self._shards is not None
            return step(_Observed(iterator, self._observe) if is_observed else iterator)
        # An execution that begins with batches that were read ahead.
        steps = fit.model.steps_per_execution
        batches, self._waiting = self._waiting[:steps], self._waiting[steps:]
        batches += _some(iterator, steps - len(batches))
        for batch in batches:
            self._observe(batch)
        return step(batches)

    def _observe(self, batch: StepInput) -> None:
        if self._shards is not None:
            self._shards.observe(batch)

    def _new_shards(self) -> ShardStatistics:
        strategy = distribute_strategy(self.model)
        return self._tools.ShardStatistics(strategy, schema=self._schema, features=self._features)

    def _known_features(self, batch: Batch) -> Mapping[str, Rows]:
        if isinstance(batch, (tuple, list)) and len(batch) == 3:
            batch = batch if self._knows_weights else batch[:2]
        return self._tools.features_of_batch(batch)

    # --- findings

    def _check(self, batches: list[StepInput]) -> None:
        shards = self._new_shards()
        for batch in batches:
            shards.observe(batch)
        found = [
            anomaly
            for statistics in shards.finish().values()
            if statistics.datasets[0].num_examples
            for anomaly in self._tools.find_anomalies(statistics, self._schema, self._environment)
        ]
        self.anomalies = list(dict.fromkeys(found))
        affected = self._workers_with_anomalies()
        if not affected:
            message = f"Data validation: no anomaly in the first {self._first_batches} batch(es)."
            tell(message, distribute_strategy(self.model), self._verbose)
            return
        message = self._describe(affected)
        if self._on_anomaly == "raise":
            raise self._tools.DataAnomalyError(message, self.anomalies)
        if self.anomalies:
            _logger.warning("%s", message)

    def _workers_with_anomalies(self) -> list[int]:
        flag = np.array([len(self.anomalies)], np.int64)
        strategy = distribute_strategy(self.model)
        if getattr(strategy, "num_workers", 1) > 1:
            flag = strategy.extended.gather_over_workers(flag)
        return [int(worker) for worker in np.flatnonzero(flag)]

    def _describe(self, affected: list[int]) -> str:
        found = self.anomalies
        lines = [f"  {anomaly}" for anomaly in found[:_MOST_SHOWN]]
        if len(found) > _MOST_SHOWN:
            lines.append(f"  and {len(found) - _MOST_SHOWN} more")
        if self._on_anomaly == "raise":
            lines.append(
                "No weight has changed. Correct the data, or the schema if the data is right."
            )
        here = "" if found else " This worker's samples are right; see the output of the others."
        head = (
            f"The first {self._first_batches} batch(es) are not what the schema says, on worker(s) "
            f"{affected}.{here}"
        )
        return "\n".join([head, *lines])

    def _compare(self, epoch: int, replicas: dict[int, Statistics]) -> None:
        shards = {f"replica {replica}": shard for replica, shard in replicas.items()}
        has_rows = any(shard.datasets[0].num_examples for shard in shards.values())
        distances = self._tools.compare_shards(shards, self._schema) if has_rows else []
        self.distances.append(distances)
        strategy = distribute_strategy(self.model)
        if not getattr(strategy, "is_chief", True):
            return
        exceeded = [distance for distance in distances if distance.is_exceeded]
        message = (
            f"Data validation, epoch {epoch + 1}: {len(exceeded)} of {len(distances)} "
            "distances between shards are above their thresholds."
        )
        tell(message, strategy, self._verbose)
        if exceeded:
            lines = "".join(f"\n  {distance}" for distance in exceeded[:_MOST_SHOWN])
            _logger.warning("Epoch %d: the shards of the replicas differ.%s", epoch + 1, lines)
        self._write(epoch, replicas)

    def _write(self, epoch: int, replicas: dict[int, Statistics]) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        # Files of an earlier training would pass for replicas or later epochs of this one.
        for old in self._directory.glob("epoch-*-replica-*.stats"):
            number = old.name.split("-")[1]
            if number.isdecimal() and int(number) > epoch:
                old.unlink(missing_ok=True)
        for replica, statistics in replicas.items():
            name = f"epoch-{epoch + 1:04d}-replica-{replica}.stats"
            # A reader sees the old file or the new one, never half of it.
            temporary = self._directory / f"{name}.tmp"
            temporary.write_bytes(statistics.SerializeToString())
            temporary.replace(self._directory / name)


class _Observed(MeteredIterator):
    """Substitute for an iterator during one execution that exposes each of its elements."""

    why_path_stays = "DataValidation(compare_shards=True) looks at every batch on its way"

    def __init__(
        self, iterator: Iterator[StepInput], observe: Callable[[StepInput], object]
    ) -> None:
        super().__init__(iterator)
        self._observe = observe

    def __next__(self) -> StepInput:
        element = super().__next__()
        self._observe(element)
        return element


def _some(iterator: Iterator[StepInput], count: int) -> list[StepInput]:
    batches: list[StepInput] = []
    try:
        while len(batches) < count:
            batches.append(next(iterator))
    except (StopIteration, tf.errors.OutOfRangeError):
        pass  # the end of the epoch
    return batches
