"""Statistics of datasets and of what replicas consume, computed by TFDV."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Batch, Leaf, Rows, StepInput
from keras_het.loader.validation.features import features_of_batch, record_batch
from keras_het.loader.validation.tfdv_adapter import (
    Combiner,
    Schema,
    Statistics,
    example_coder,
    get_generators,
    pyarrow,
    schema_pb2,
    statistics_pb2,
    tfdv,
)

FeaturesFunction = Callable[[Any], Mapping[str, Any]]
"""Makes named features of a batch; see `features_of_batch`."""

_ROWS_AT_ONCE = 8192
_EXAMPLES_TO_DECODE = 1024
_COMPRESSIONS = {".gz": "GZIP", ".zlib": "ZLIB"}


class StatisticsBuilder:
    """Accumulator of statistics for data that arrives in pieces; memory stays bounded.

    Args:
        name: name of the dataset.
        schema: tells which features are categorical.
        categorical: names of integer features whose values are categories, such as labels.
        options: `tensorflow_data_validation.StatsOptions` instead of the usual ones; `schema` and
            `categorical` are added to them.

    Attributes:
        rows: number of rows added.
    """

    def __init__(
        self,
        name: str = "",
        *,
        schema: Schema | None = None,
        categorical: Iterable[str] = (),
        options: tfdv.StatsOptions | None = None,
    ) -> None:
        self.rows = 0
        self._name = name
        with_categories = _with_categories(options or tfdv.StatsOptions(), schema, categorical)
        # A call of TFDV takes a few milliseconds, whatever the number of rows.
        self._combiner = Combiner(get_generators(with_categories, in_memory=True), _ROWS_AT_ONCE)
        self._sums = self._combiner.create_accumulator()

    def add(self, features: Mapping[str, Rows] | pyarrow.RecordBatch) -> None:
        """Add rows.

        Args:
            features: names to tensors of shape [rows] or [rows, values], see `features_of_batch`;
                or an Arrow record batch with a column of lists for each feature.
        """
        if self._sums is None:
            raise RuntimeError("These statistics are finished. Use a new StatisticsBuilder.")
        batch = record_batch(features) if isinstance(features, Mapping) else features
        if batch.num_rows:
            self.rows += batch.num_rows
            self._sums = self._combiner.add_input(self._sums, batch)

    def finish(self) -> Statistics:
        """Return the statistics of all rows; nothing can be added afterwards."""
        sums, self._sums = self._sums, None
        found = statistics_pb2.DatasetFeatureStatistics()
        if self.rows:
            found = self._combiner.extract_output(self._combiner.compact(sums))
        found.name = self._name
        return Statistics(datasets=[found])


def _with_categories(
    options: tfdv.StatsOptions, schema: Schema | None, categorical: Iterable[str]
) -> tfdv.StatsOptions:
    names = {categorical} if isinstance(categorical, str) else set(categorical)
    if schema is None and not names:
        return options
    known = schema_pb2.Schema()
    known.CopyFrom(schema or options.schema or known)
    for name in names - {feature.name for feature in known.feature}:
        known.feature.add(name=name, type=schema_pb2.INT)
    for feature in known.feature:
        if feature.name in names and feature.type == schema_pb2.INT:
            feature.int_domain.is_categorical = True
    changed = copy.copy(options)
    changed.schema = known
    return changed


def statistics_of_dataset(
    data: Mapping[str, Rows] | Iterable[Batch],
    *,
    features: FeaturesFunction = features_of_batch,
    max_batches: int | None = None,
    **options: Any,
) -> Statistics:
    """Compute the statistics of batches, or of one mapping of tensors.

    Args:
        data: mapping of names to tensors with the same number of rows; or an iterable of batches as
            `model.fit` takes them, such as a `tf.data.Dataset`.
        features: makes the features of a batch.
        max_batches: maximum number of batches to read, by default all.
        **options: `name`, `schema`, `categorical` and `options` of `StatisticsBuilder`.

    Returns:
        A `DatasetFeatureStatisticsList` of TFDV.
    """
    builder = StatisticsBuilder(**options)
    for number, batch in enumerate([data] if isinstance(data, Mapping) else data):
        if number == max_batches:
            break
        builder.add(features(batch))
    return builder.finish()


def statistics_of_tfrecord(pattern: str | Path, **options: Any) -> Statistics:
    """Compute the statistics of TFRecord files of `tf.train.Example`s.

    Args:
        pattern: path or pattern of files, `data/train-*.tfrecord`; ".gz" and ".zlib" are
            decompressed.
        **options: `name`, `schema`, `categorical` and `options` of `StatisticsBuilder`.

    Returns:
        A `DatasetFeatureStatisticsList` of TFDV.

    Raises:
        ValueError: if no file matches, or one does not hold examples.
    """
    path, builder = str(pattern), StatisticsBuilder(**options)
    # a name with brackets may be a file, too
    paths = [path] if tf.io.gfile.exists(path) else tf.io.gfile.glob(path)
    if not paths:
        raise ValueError(f"No file matches {path}.")
    decoder = example_coder.ExamplesToRecordBatchDecoder()
    for path in paths:
        records = tf.data.TFRecordDataset(path, _COMPRESSIONS.get(Path(path).suffix, ""))
        try:
            for examples in records.batch(_EXAMPLES_TO_DECODE).as_numpy_iterator():
                builder.add(decoder.DecodeBatch(examples.tolist()))
        except (tf.errors.DataLossError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a TFRecord file of tf.train.Examples: {error}. Compressed files "
                "must "
                "end in .gz or .zlib."
            ) from error
    return builder.finish()


class ShardStatistics:
    """Accumulator of statistics for each local replica's share of the global batches.

    Args:
        strategy: any `tf.distribute.Strategy`; with `keras_het.HeterogeneousStrategy` the replicas
            of all workers are told apart, with another one each worker knows only its own.
        schema: tells which features are categorical.
        features: makes the features of one replica's batch.

    Example: a custom loop calls `shards.observe(batch)` for each batch of
    `strategy.distribute(...)`, and `shards.gather()` on all workers at the end.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        schema: Schema | None = None,
        features: FeaturesFunction = features_of_batch,
    ) -> None:
        self._strategy, self._features = strategy, features
        layout = getattr(strategy, "layout", None)
        replicas = layout.local_replicas if layout is not None else range(_num_local(strategy))
        self._builders = {
            replica: StatisticsBuilder(f"replica {replica}", schema=schema) for replica in replicas
        }

    @property
    def rows(self) -> int:
        """Rows that the local replicas have consumed."""
        return sum(builder.rows for builder in self._builders.values())

    def observe(self, batch: StepInput) -> None:
        """Add one global batch.

        Args:
            batch: an element of the strategy's dataset; each replica's rows count for that
                replica.
        """
        for index, builder in enumerate(self._builders.values()):
            builder.add(self._features(self._of_replica(batch, index)))

    def finish(self) -> dict[int, Statistics]:
        """Return the statistics of the local replicas, by their number among all replicas."""
        return {replica: builder.finish() for replica, builder in self._builders.items()}

    def gather(self) -> dict[int, Statistics]:
        """Return the statistics of the replicas of all workers; all workers must call it."""
        own = self.finish()
        if getattr(self._strategy, "num_workers", 1) == 1:
            return own
        merged = Statistics(datasets=[each.datasets[0] for each in own.values()])
        gather = self._strategy.extended.gather_over_workers
        messages = _gather_bytes(gather, merged.SerializeToString())
        # Workers and their replicas come in the order of the replicas' numbers.
        everything = [dataset for m in messages for dataset in Statistics.FromString(m).datasets]
        return {
            replica: Statistics(datasets=[dataset]) for replica, dataset in enumerate(everything)
        }

    def _of_replica(self, batch: StepInput, index: int) -> Batch:
        def local(leaf: Leaf | tf.distribute.DistributedValues) -> Leaf:
            return None if leaf is None else self._strategy.experimental_local_results(leaf)[index]

        return tf.nest.map_structure(local, batch)


def _num_local(strategy: tf.distribute.Strategy) -> int:
    try:
        return len(strategy.extended.worker_devices)
    except RuntimeError:  # there is no strategy
        return 1


def _gather_bytes(gather: Callable[[np.ndarray], np.ndarray], message: bytes) -> list[bytes]:
    """Return the message of every worker, in worker order."""
    lengths = gather(np.array([len(message)], np.int64))
    padded = np.frombuffer(message.ljust(int(lengths.max()), b"\0"), np.uint8)
    rows = gather(padded[None])
    return [row.tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]


def num_rows(statistics: Statistics) -> int:
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0


def features_of(statistics: Statistics) -> dict[str, statistics_pb2.FeatureNameStatistics]:
    features = statistics.datasets[0].features if statistics.datasets else ()
    return {".".join(feature.path.step): feature for feature in features}


def has_values(feature: statistics_pb2.FeatureNameStatistics) -> bool:
    """Tell whether a feature has a value other than NaN: without any, TFDV says 0."""
    kind = feature.WhichOneof("stats")
    if kind is None:
        return False
    found = getattr(feature, kind)
    histograms = found.histograms if kind == "num_stats" else ()
    no_numbers = max((histogram.num_nan for histogram in histograms), default=0)
    return bool(found.common_stats.tot_num_values > no_numbers)
