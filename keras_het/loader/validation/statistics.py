"""Statistics of data sets and of what replicas consume, a few thousand rows at a time by TFDV."""

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
    Schema,
    Statistics,
    example_coder,
    pyarrow,
    schema_pb2,
    statistics_pb2,
    stats_impl,
    table_util,
    tfdv,
)

FeaturesFunction = Callable[[Any], Mapping[str, Any]]
"""Makes named features of a batch; see `features_of_batch`."""

_ROWS_AT_ONCE = 8192
_BYTES_AT_ONCE = 1 << 24
_EXAMPLES_TO_DECODE = 1024
_COMPRESSIONS = {".gz": "GZIP", ".zlib": "ZLIB"}


class StatisticsBuilder:
    """Accumulator of statistics for data that arrives in pieces; memory stays bounded.

    Args:
        name: name of the data set.
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
        self._options = _with_categories(options or tfdv.StatsOptions(), schema, categorical)
        self._generators = stats_impl.get_generators(self._options, in_memory=True)
        self._partial = [generator.create_accumulator() for generator in self._generators]
        self._waiting: list[pyarrow.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._is_finished = False

    def add(self, features: Mapping[str, Rows]) -> None:
        """Add rows.

        Args:
            features: names to tensors of shape [rows] or [rows, values], see `features_of_batch`.
        """
        self.add_batch(record_batch(features))

    def add_batch(self, batch: pyarrow.RecordBatch) -> None:
        """Add the rows of an Arrow record batch.

        Args:
            batch: a column of lists for each feature.
        """
        if self._is_finished:
            raise RuntimeError("These statistics are finished. Use a new StatisticsBuilder.")
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= _ROWS_AT_ONCE or self._waiting_bytes >= _BYTES_AT_ONCE:
            self._flush()

    def finish(self) -> Statistics:
        """Return the statistics of all rows; nothing can be added afterwards."""
        self._flush()
        self._is_finished = True
        statistics = stats_impl.extract_statistics_output(self._partial, self._generators)
        if not statistics.datasets:
            statistics.datasets.add()
        statistics.datasets[0].name = self._name
        return statistics

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        if waiting:
            # A TFDV call takes a few milliseconds, whatever the number of rows.
            batch = table_util.MergeRecordBatches(waiting)
            new = stats_impl.generate_partial_statistics_in_memory(
                batch, self._options, self._generators
            )
            pairs = zip(self._generators, zip(self._partial, new, strict=True), strict=True)
            self._partial = [generator.merge_accumulators(pair) for generator, pair in pairs]


def _with_categories(
    options: tfdv.StatsOptions, schema: Schema | None, categorical: Iterable[str]
) -> tfdv.StatsOptions:
    names = [categorical] if isinstance(categorical, str) else list(categorical)
    if schema is None and not names:
        return options
    known = schema_pb2.Schema()
    known.CopyFrom(schema or options.schema or known)
    features = {feature.name: feature for feature in known.feature}
    for name in names:
        feature = features.get(name) or known.feature.add(name=name, type=schema_pb2.INT)
        if feature.type == schema_pb2.INT:
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
                builder.add_batch(decoder.DecodeBatch(examples.tolist()))
        except (tf.errors.DataLossError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is no TFRecord file of tf.train.Examples: {error}. Compressed files must "
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
            batch: an element of the strategy's data set; each replica's rows count for that
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
    # Collectives carry integers of 8 bytes, not bytes.
    words = -(-int(lengths.max()) // 8)
    padded = np.frombuffer(message.ljust(8 * words, b"\0"), np.int64)
    gathered = gather(padded).reshape(len(lengths), words)
    return [row.tobytes()[:length] for row, length in zip(gathered, lengths, strict=True)]


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
