"""Differences between data and its schema, and between the shards of different workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from keras_het.loader.validation.statistics import features_of, has_values, num_rows
from keras_het.loader.validation.tfdv_adapter import Schema, Statistics, anomalies_pb2, tfdv

_MEASURES = {
    "infinity_norm": ("L_INFTY", "L-infinity"),
    "jensen_shannon_divergence": ("JENSEN_SHANNON_DIVERGENCE", "Jensen-Shannon"),
}


class Anomaly(NamedTuple):
    """One way in which data deviates from its schema.

    Args:
        feature: name of the feature, "" for the whole dataset.
        reason: in a few words.
        description: with the values found.
    """

    feature: str
    reason: str
    description: str

    def __str__(self) -> str:
        return f"{self.feature or 'dataset'}: {self.reason} ({self.description})"


class DataAnomalyError(ValueError):
    """Data deviates from its schema.

    Args:
        message: the findings.
        anomalies: those of this worker's data; empty if only others found some.
    """

    def __init__(self, message: str, anomalies: Sequence[Anomaly] = ()) -> None:
        super().__init__(message)
        self.anomalies = tuple(anomalies)


def find_anomalies(
    statistics: Statistics, schema: Schema, environment: str | None = None
) -> list[Anomaly]:
    """Compare data with its schema.

    Args:
        statistics: statistics of the data.
        schema: what it should look like.
        environment: environment of the schema, such as "TRAINING", if it has some.

    Returns:
        The anomalies, by feature; none if the data is correct.

    Reference: `tensorflow_data_validation.validate_statistics`.
    """
    found = tfdv.validate_statistics(statistics, schema, environment=environment)
    missing = [Anomaly("", "No data", "there are no rows")] if found.data_missing else []
    reasons = [(name, info.reason) for name, info in sorted(found.anomaly_info.items())]
    return missing + [
        Anomaly(feature, reason.short_description, reason.description)
        for feature, of_feature in (*reasons, ("", found.dataset_anomaly_info.reason))
        for reason in of_feature
    ]


@dataclasses.dataclass(frozen=True)
class ShardDistance:
    """Distance of one feature between two shards.

    Args:
        shard: name of the shard.
        reference: name of the shard it was compared with.
        feature: name of the feature.
        measure: "L-infinity" or "Jensen-Shannon".
        value: the distance, from 0 to 1; 1 if only one of the two has values.
        threshold: threshold of the schema.
    """

    shard: str
    reference: str
    feature: str
    measure: str
    value: float
    threshold: float

    @property
    def is_exceeded(self) -> bool:
        """Whether the distance is above its threshold."""
        return self.value > self.threshold

    def __str__(self) -> str:
        sign = ">" if self.is_exceeded else "<="
        return (
            f"{self.feature}: {self.measure} distance of {self.shard} from {self.reference} "
            f"{self.value:.4f} {sign} {self.threshold:g}"
        )


def compare_shards(
    shards: Mapping[str, Statistics], schema: Schema, reference: str | None = None
) -> list[ShardDistance]:
    """Measure the skew between shards that were consumed at the same time.

    Every shard is compared with the reference, in each feature for which the schema has a skew
    comparator. Shards without rows are left out.

    Args:
        shards: names to statistics.
        schema: a schema with thresholds, see `set_comparison_thresholds`.
        reference: name of the shard to compare with, by default the one with most rows: that of the
            fastest worker.

    Returns:
        The distances, greatest excess over its threshold first.

    Raises:
        ValueError: if there is no such reference, or the schema has no thresholds.
    """
    if not any(feature.HasField("skew_comparator") for feature in schema.feature):
        raise ValueError(
            "The schema has no feature with a skew comparator, so there is nothing to compare. "
            "Call keras_het.loader.validation.set_comparison_thresholds(schema) first."
        )
    filled = {name: shard for name, shard in shards.items() if num_rows(shard)}
    if reference is None and filled:
        reference = max(filled, key=lambda name: num_rows(filled[name]))
    if reference not in filled:
        raise ValueError(
            f"There is no reference with rows. Received: reference={reference!r}; shards with "
            f"rows: {sorted(filled)}."
        )
    distances = [
        ShardDistance(name, reference, *found)
        for name, shard in filled.items()
        if name != reference
        for found in _distances(shard, filled[reference], schema)
    ]
    return sorted(distances, key=lambda distance: distance.threshold - distance.value)


def _distances(
    shard: Statistics, reference: Statistics, schema: Schema
) -> Iterator[tuple[str, str, float, float]]:
    """Yield feature, measure, distance and threshold, where one of the two has values."""
    verdict = tfdv.validate_statistics(shard, schema, serving_statistics=reference)
    type_name = anomalies_pb2.DriftSkewInfo.Measurement.Type.Name
    measured = {
        (".".join(info.path.step), type_name(each.type)): each.value
        for info in verdict.drift_skew_info
        for each in info.skew_measurements
    }
    own, others = (
        {name for name, feature in features_of(each).items() if has_values(feature)}
        for each in (shard, reference)
    )
    for feature in schema.feature:
        for field, (type_, measure) in _MEASURES.items():
            if not feature.skew_comparator.HasField(field) or feature.name not in own | others:
                continue
            value = measured.get((feature.name, type_))
            # A feature that only one has is as far as can be. TFDV then has no distance for
            # numbers, and for categories the frequency of the most frequent one.
            if feature.name not in own & others:
                value = 1.0
            if value is not None:
                threshold = getattr(feature.skew_comparator, field).threshold
                yield feature.name, measure, value, threshold
