"""Distances between the shards of data that different workers consume."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    anomalies_pb2,
    statistics_pb2,
    tfdv,
)

_MEASURES = {
    "infinity_norm": "L_INFTY",
    "jensen_shannon_divergence": "JENSEN_SHANNON_DIVERGENCE",
}


def one_sided_features(
    statistics: Statistics, other: Statistics, schema: Schema, kind: str
) -> dict[str, tuple[str, float]]:
    """Return features with a comparator of which only one of two shards has values.

    A missing feature is at the greatest possible distance. TFDV then has no distance for numbers,
    and for categories the frequency of the most frequent one, which is small if there are many.
    """
    one_sided = features_with_values(statistics) ^ features_with_values(other)
    return {
        feature.name: (name, getattr(comparator, measure).threshold)
        for feature in schema.feature
        if feature.name in one_sided
        for comparator in [getattr(feature, f"{kind}_comparator")]
        for measure, name in _MEASURES.items()
        if comparator.HasField(measure)
    }


def features_with_values(statistics: Statistics) -> set[str]:
    """Return the names of the features that have a value other than NaN."""
    found = filter(_has_values, _features(statistics))
    return {".".join(feature.path.step) for feature in found}


def _has_values(feature: statistics_pb2.FeatureNameStatistics) -> bool:
    kind = feature.WhichOneof("stats")
    if kind is None:
        return False
    found = getattr(feature, kind)
    histograms = found.histograms if kind == "num_stats" else ()
    no_numbers = max((histogram.num_nan for histogram in histograms), default=0)
    return bool(found.common_stats.tot_num_values > no_numbers)


def with_comparable_constants(statistics: Statistics, other: Statistics) -> Statistics:
    """Put the histogram of each constant feature into the buckets of the other data.

    The histogram of a constant is one bucket without width, which for TFDV overlaps no bucket of
    another histogram: even if only a handful of values differ, it finds a Jensen-Shannon divergence
    of 1.
    """
    changed = statistics_pb2.DatasetFeatureStatisticsList()
    changed.CopyFrom(statistics)
    others = {_path(feature): feature for feature in _features(other)}
    for feature in _features(changed):
        found = _standard_histogram(feature)
        pattern = _standard_histogram(others.get(_path(feature)))
        if found is None or pattern is None or len({_edges(b) for b in found.buckets}) != 1:
            continue
        (low, high), count = _edges(found.buckets[0]), found.buckets[0].sample_count
        if low == high and len(pattern.buckets) > 1:
            _rebucket(found, low, count, pattern)
    return changed


def _rebucket(
    histogram: statistics_pb2.Histogram,
    value: float,
    count: float,
    pattern: statistics_pb2.Histogram,
) -> None:
    edges = [_edges(bucket) for bucket in pattern.buckets]
    holding = [i for i, (low, high) in enumerate(edges) if low <= value <= high]
    if not holding:
        return
    del histogram.buckets[:]
    for index, (low, high) in enumerate(edges):
        # A value on an edge belongs to the bucket above it, as in numpy.histogram.
        rows = count if index == holding[-1] else 0.0
        histogram.buckets.add(low_value=low, high_value=high, sample_count=rows)


def _standard_histogram(
    feature: statistics_pb2.FeatureNameStatistics | None,
) -> statistics_pb2.Histogram | None:
    if feature is None or feature.WhichOneof("stats") != "num_stats":
        return None
    standard = statistics_pb2.Histogram.STANDARD
    return next((h for h in feature.num_stats.histograms if h.type == standard), None)


def _features(statistics: Statistics) -> Sequence[statistics_pb2.FeatureNameStatistics]:
    return statistics.datasets[0].features if statistics.datasets else ()


def _path(feature: statistics_pb2.FeatureNameStatistics) -> tuple[str, ...]:
    return tuple(feature.path.step)


def _edges(bucket: statistics_pb2.Histogram.Bucket) -> tuple[float, float]:
    return bucket.low_value, bucket.high_value


_NAMES = {"L_INFTY": "L-infinity", "JENSEN_SHANNON_DIVERGENCE": "Jensen-Shannon"}


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
        kind: "skew" (shards of one epoch) or "drift" (a shard and its predecessor).
    """

    shard: str
    reference: str
    feature: str
    measure: str
    value: float
    threshold: float
    kind: str = "skew"

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
    _check_comparators(schema, "skew")
    filled = {name: shard for name, shard in shards.items() if num_rows(shard)}
    if reference is None and filled:
        reference = max(filled, key=lambda name: num_rows(filled[name]))
    if reference not in filled:
        raise ValueError(
            f"There is no reference with rows. Received: reference={reference!r}; shards with "
            f"rows: {sorted(filled)}."
        )
    distances = [
        distance
        for name, shard in filled.items()
        if name != reference
        for distance in _distances(shard, filled[reference], schema, (name, reference), "skew")
    ]
    return sorted(distances, key=lambda distance: distance.threshold - distance.value)


def measure_drift(
    statistics: Statistics,
    previous: Statistics,
    schema: Schema,
    *,
    name: str = "now",
    previous_name: str = "before",
) -> list[ShardDistance]:
    """Measure how far data has moved since an earlier epoch or an earlier day.

    Args:
        statistics: statistics of the present data.
        previous: statistics of the earlier data.
        schema: a schema with thresholds of drift, see `set_comparison_thresholds`.
        name: name of the present data.
        previous_name: name of the earlier data.

    Returns:
        The distances, greatest excess over its threshold first.

    Raises:
        ValueError: if the schema has no thresholds of drift.
    """
    _check_comparators(schema, "drift")
    distances = _distances(statistics, previous, schema, (name, previous_name), "drift")
    return sorted(distances, key=lambda distance: distance.threshold - distance.value)


def validate_against(
    statistics: Statistics, schema: Schema, other: Statistics | None = None, kind: str = "skew"
) -> anomalies_pb2.Anomalies:
    """Return TFDV's verdict on data: its anomalies, and its distances from other data."""
    if other is None:
        return tfdv.validate_statistics(statistics, schema)
    before = with_comparable_constants(other, statistics)
    now = with_comparable_constants(statistics, other)
    role = "serving_statistics" if kind == "skew" else "previous_statistics"
    return tfdv.validate_statistics(now, schema, **{role: before})


def num_rows(statistics: Statistics) -> int:
    """Return the number of rows of the data of these statistics."""
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0


def _distances(
    statistics: Statistics, other: Statistics, schema: Schema, names: tuple[str, str], kind: str
) -> list[ShardDistance]:
    found = validate_against(statistics, schema, other, kind)
    measured = [
        (".".join(info.path.step), _type(each), each.value, each.threshold)
        for info in found.drift_skew_info
        for each in getattr(info, f"{kind}_measurements")
    ]
    # For features without values, TFDV finds that NaN is far from NaN.
    in_both = features_with_values(statistics) & features_with_values(other)
    measured = [each for each in measured if each[0] in in_both]
    measured += [
        (name, type_, 1.0, threshold)
        for name, (type_, threshold) in one_sided_features(statistics, other, schema, kind).items()
    ]
    return [
        ShardDistance(*names, feature, _NAMES.get(type_, type_), value, threshold, kind)
        for feature, type_, value, threshold in measured
    ]


def _type(measurement: anomalies_pb2.DriftSkewInfo.Measurement) -> str:
    return str(anomalies_pb2.DriftSkewInfo.Measurement.Type.Name(measurement.type))


def _check_comparators(schema: Schema, kind: str) -> None:
    if not any(feature.HasField(f"{kind}_comparator") for feature in schema.feature):
        raise ValueError(
            f"The schema has no feature with a {kind} comparator, so there is nothing to compare. "
            "Call keras_het.loader.validation.set_comparison_thresholds(schema) first."
        )
