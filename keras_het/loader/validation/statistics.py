"""Statistics of datasets and of what replicas consume, computed by TFDV."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Batch, Leaf, Rows, StepInput
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

_PARTS = ("x", "label", "sample_weight")
_SUMMARY = {"mean": "mean", "standard_deviation": "std", "minimum": "min", "maximum": "max"}


def features_of_batch(batch: Batch) -> dict[str, Rows]:
    """The features of a batch by name.

    A batch is a mapping of tensors, or `x`, `(x, y)`, `(x, y, sample_weight)` as Keras takes them.
    Tensors in a mapping keep their names, after "sample_weight/" if they are weights; others are
    called "x", "label" and "sample_weight", with "/0", "/1"... if there are several. Rows of rank 0
    and 1 are features as they are. Mean, standard deviation, minimum and maximum stand for rows of
    higher rank, such as images.

    Args:
        batch: structure of dense, ragged or sparse tensors or arrays, shape [rows, ...].

    Returns:
        Names to arrays of shape [rows] or [rows, values], ragged or sparse tensors.

    Raises:
        ValueError: if two features have the same name, or a tensor has no rows.
        TypeError: if strings have a rank above 2.
    """
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(parts) > len(_PARTS):
        raise ValueError(
            "A batch must be x, (x, y) or (x, y, sample_weight). "
            f"Received: a tuple of {len(parts)} parts."
        )
    features: dict[str, Rows] = {}
    for part_name, part in zip(_PARTS, parts, strict=False):
        # the weights of several outputs have the names of these
        for name, leaf in _leaves(part_name, part, is_top=part_name != "sample_weight"):
            for derived, value in _derive(name, leaf):
                if derived in features:
                    raise ValueError(
                        f"Two features of the batch are called {derived!r}. Give a function "
                        "`features` that returns a mapping of names to tensors."
                    )
                features[derived] = value
    return features


def _leaves(name: str, part: Batch, is_top: bool = False) -> Iterator[tuple[str, Rows]]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _leaves(str(key) if is_top else f"{name}/{key}", value)
    elif isinstance(part, (tuple, list)):
        for index, value in enumerate(part):
            yield from _leaves(f"{name}/{index}", value)
    elif part is not None and not isinstance(part, tf.experimental.Optional):
        yield name, part


def _derive(name: str, leaf: Rows) -> Iterator[tuple[str, Rows]]:
    rank = len(getattr(leaf, "shape", ()))
    if rank == 0:
        raise ValueError(
            f"Feature {name!r} is a scalar; expected a tensor of shape [rows, ...]. A list counts "
            "as several tensors: make it an array."
        )
    if rank <= 2:
        yield name, leaf
        return
    if tf.as_dtype(leaf.dtype) == tf.string:
        raise TypeError(
            f"Feature {name!r} has strings of shape {tuple(leaf.shape)}; expected [rows] or [rows, "
            'values]. Give a function "features" that makes such of them, or numbers.'
        )
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    rows = leaf if isinstance(leaf, tf.RaggedTensor) else np.asarray(leaf)
    # float64 only where the data has such numbers: it takes several times as long
    wide = np.result_type(tf.as_dtype(leaf.dtype).as_numpy_dtype, np.float32)
    flat = [np.ravel(getattr(row, "flat_values", row)).astype(wide, copy=False) for row in rows]
    for key, method in _SUMMARY.items():
        numbers = [getattr(row, method)() if row.size else np.nan for row in flat]
        yield f"{name}/{key}", np.array(numbers, np.float32)


def record_batch(features: Mapping[str, Rows]) -> pyarrow.RecordBatch:
    """Make a record batch in which each row of a feature is a list of values."""
    if not features:
        raise ValueError("There is no feature. Expected a mapping of names to tensors.")
    columns = {name: _column(name, value) for name, value in features.items()}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"All features of a batch must have the same number of rows: {rows}.")
    return pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _column(name: str, value: Rows) -> pyarrow.LargeListArray:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.reorder(value)
        row_of_value, rows = value.indices[:, 0], value.dense_shape[0]
        value = tf.RaggedTensor.from_value_rowids(value.values, row_of_value, rows)
    if isinstance(value, tf.RaggedTensor):
        values, splits = value.flat_values.numpy(), value.row_splits.numpy()
    else:
        array = np.asarray(value)
        if array.ndim not in (1, 2):
            raise TypeError(
                f"Feature {name!r} has shape {array.shape}; expected [rows] or [rows, values]. "
                "Derive features of lower rank, as features_of_batch does."
            )
        values, splits = array.ravel(), np.arange(len(array) + 1) * array[:1].size
    try:
        return pyarrow.LargeListArray.from_arrays(splits.astype(np.int64), _values(values))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"TensorFlow Data Validation cannot take feature {name!r}. Received: {error}; expected "
            "numbers, integers of at most 2**63 - 1, booleans or strings. Give a function "
            "`features` that makes such, as tf.strings.as_string does of ids."
        ) from error


def _values(values: np.ndarray) -> pyarrow.Array:
    kind = values.dtype.kind
    if kind in "OSU":
        texts = [tf.compat.as_bytes(value) for value in values]
        return pyarrow.array(texts, pyarrow.large_binary())
    if kind in "iub":
        return pyarrow.array(values).cast(pyarrow.int64())
    if values.dtype == np.float64:
        return pyarrow.array(values)
    if kind in "fV":  # V: bfloat16 and the like
        return pyarrow.array(values.astype(np.float32))
    raise TypeError(f"type {values.dtype}")


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
                "must end in .gz or .zlib."
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
