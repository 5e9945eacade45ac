"""Statistics of data sets, computed by TFDV a few thousand rows at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_het.loader.nested import Batch, Rows
from keras_het.loader.validation.batch_features import features_of_batch
from keras_het.loader.validation.record_batches import record_batch
from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    example_coder,
    pyarrow,
    schema_pb2,
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
        name: name of the data set in reports.
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
        self._add(record_batch(features))

    def add_examples(self, examples: Sequence[bytes]) -> None:
        """Add rows.

        Args:
            examples: serialised `tf.train.Example`s.
        """
        if examples:
            self._add(example_coder.ExamplesToRecordBatchDecoder().DecodeBatch(list(examples)))

    def finish(self) -> Statistics:
        """Return the statistics of all rows; nothing can be added afterwards."""
        self._flush()
        self._is_finished = True
        statistics = stats_impl.extract_statistics_output(self._partial, self._generators)
        if not statistics.datasets:
            statistics.datasets.add()
        statistics.datasets[0].name = self._name
        return statistics

    def _add(self, batch: pyarrow.RecordBatch) -> None:
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


def statistics_of_dataset(
    data: Mapping[str, Rows] | Iterable[Batch],
    *,
    name: str = "",
    schema: Schema | None = None,
    categorical: Iterable[str] = (),
    features: FeaturesFunction = features_of_batch,
    max_batches: int | None = None,
    options: tfdv.StatsOptions | None = None,
) -> Statistics:
    """Compute the statistics of batches, or of one mapping of tensors.

    Args:
        data: mapping of names to tensors with the same number of rows; or an iterable of batches as
            `model.fit` takes them, such as a `tf.data.Dataset`.
        name: name of the data set in reports.
        schema: tells which features are categorical.
        categorical: names of integer features whose values are categories.
        features: makes the features of a batch.
        max_batches: maximum number of batches to read, by default all.
        options: `tensorflow_data_validation.StatsOptions`.

    Returns:
        A `DatasetFeatureStatisticsList` of TFDV.
    """
    builder = StatisticsBuilder(name, schema=schema, categorical=categorical, options=options)
    batches = [data] if isinstance(data, Mapping) else data
    for number, batch in enumerate(batches):
        if number == max_batches:
            break
        builder.add(features(batch))
    return builder.finish()


def statistics_of_tfrecord(
    files: str | Path | Sequence[str | Path],
    *,
    name: str = "",
    schema: Schema | None = None,
    categorical: Iterable[str] = (),
    options: tfdv.StatsOptions | None = None,
) -> Statistics:
    """Compute the statistics of TFRecord files of `tf.train.Example`s.

    Args:
        files: paths or patterns (`data/train-*.tfrecord`); ".gz" and ".zlib" are decompressed.
        name: name of the data set in reports.
        schema: tells which features are categorical.
        categorical: names of integer features whose values are categories.
        options: `tensorflow_data_validation.StatsOptions`.

    Returns:
        A `DatasetFeatureStatisticsList` of TFDV.

    Raises:
        ValueError: if no file matches, or a file does not hold examples.
    """
    builder = StatisticsBuilder(name, schema=schema, categorical=categorical, options=options)
    for path in _matching(files):
        records = tf.data.TFRecordDataset(path, _COMPRESSIONS.get(Path(path).suffix, ""))
        try:
            for examples in records.batch(_EXAMPLES_TO_DECODE).as_numpy_iterator():
                builder.add_examples(examples.tolist())
        except (tf.errors.DataLossError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is no TFRecord file of tf.train.Examples: {error}. Compressed files must "
                "end in .gz or .zlib."
            ) from error
    return builder.finish()


def _matching(files: str | Path | Sequence[str | Path]) -> list[str]:
    patterns = [str(file) for file in ([files] if isinstance(files, (str, Path)) else files)]
    # A name with brackets may be a file, too.
    found = [
        path
        for pattern in patterns
        for path in ([pattern] if tf.io.gfile.exists(pattern) else tf.io.gfile.glob(pattern))
    ]
    if not found:
        raise ValueError(f"No file matches {patterns}.")
    return found


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
