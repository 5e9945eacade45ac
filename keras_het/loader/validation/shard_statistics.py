"""Statistics of the data that each replica really consumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het.loader.nested import Batch, Leaf, StepInput
from keras_het.loader.validation.batch_features import features_of_batch
from keras_het.loader.validation.data_statistics import FeaturesFunction, StatisticsBuilder
from keras_het.loader.validation.tfdv_adapter import Schema, Statistics, statistics_pb2

if TYPE_CHECKING:
    from keras_het.strategy.extended import HeterogeneousExtended


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
        self._strategy = strategy
        self._features = features
        layout = getattr(strategy, "layout", None)
        first = layout.local_replicas.start if layout is not None else 0
        count = len(layout.local_replicas) if layout is not None else _num_local(strategy)
        self._builders = {
            first + index: StatisticsBuilder(f"replica {first + index}", schema=schema)
            for index in range(count)
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
        return _gather(self._strategy.extended, own)

    def _of_replica(self, batch: StepInput, index: int) -> Batch:
        def local(leaf: Leaf | tf.distribute.DistributedValues) -> Leaf:
            return None if leaf is None else self._strategy.experimental_local_results(leaf)[index]

        return tf.nest.map_structure(local, batch)


def _num_local(strategy: tf.distribute.Strategy) -> int:
    """Return the number of replicas of this process under a TensorFlow strategy."""
    try:
        return len(strategy.extended.worker_devices)
    except RuntimeError:  # there is no strategy
        return 1


def _gather(extended: HeterogeneousExtended, own: dict[int, Statistics]) -> dict[int, Statistics]:
    merged = statistics_pb2.DatasetFeatureStatisticsList()
    for statistics in own.values():
        merged.datasets.append(statistics.datasets[0])
    everything: list[Statistics] = []
    for message in _gather_bytes(extended, merged.SerializeToString()):
        everything += statistics_pb2.DatasetFeatureStatisticsList.FromString(message).datasets
    # Workers and their replicas come in the order of the replicas' numbers.
    return {
        replica: statistics_pb2.DatasetFeatureStatisticsList(datasets=[dataset])
        for replica, dataset in enumerate(everything)
    }


def _gather_bytes(extended: HeterogeneousExtended, message: bytes) -> list[bytes]:
    """Return the message of every worker, in worker order."""
    lengths = extended.gather_over_workers(np.array([len(message)], np.int64))
    # Collectives carry integers of 8 bytes, not bytes.
    words = -(-int(lengths.max()) // 8)
    padded = np.frombuffer(message.ljust(8 * words, b"\0"), np.int64)
    gathered = extended.gather_over_workers(padded).reshape(len(lengths), words)
    return [row.tobytes()[:length] for row, length in zip(gathered, lengths, strict=True)]
