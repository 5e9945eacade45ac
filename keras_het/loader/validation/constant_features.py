"""Makes histograms of a constant comparable with those of features that are not constant."""

from __future__ import annotations

from typing import Any

from keras_het.loader.validation.tfdv_adapter import Statistics, statistics_pb2


def with_comparable_constants(statistics: Statistics, other: Statistics) -> Statistics:
    """Puts the histogram of each constant feature into the buckets of the other data.

    The histogram of a constant is one bucket without width, which for TFDV overlaps no bucket of
    another histogram: where a handful of values differs, it finds a Jensen-Shannon divergence of 1.

    Args:
        statistics: of the data with constants; not changed.
        other: of the data that it is to be compared with.

    Returns:
        Statistics with other histograms where a feature is constant in `statistics` only, and the
        constant is within the range of the other data.
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


def _rebucket(histogram: Any, value: float, count: float, pattern: Any) -> None:
    edges = [_edges(bucket) for bucket in pattern.buckets]
    holding = [i for i, (low, high) in enumerate(edges) if low <= value <= high]
    if not holding:
        return
    del histogram.buckets[:]
    for index, (low, high) in enumerate(edges):
        # A value on an edge belongs to the bucket above it, as in numpy.histogram.
        rows = count if index == holding[-1] else 0.0
        histogram.buckets.add(low_value=low, high_value=high, sample_count=rows)


def _standard_histogram(feature: Any) -> Any:
    if feature is None or feature.WhichOneof("stats") != "num_stats":
        return None
    standard = statistics_pb2.Histogram.STANDARD
    return next((h for h in feature.num_stats.histograms if h.type == standard), None)


def _features(statistics: Statistics) -> Any:
    return statistics.datasets[0].features if statistics.datasets else ()


def _path(feature: Any) -> tuple[str, ...]:
    return tuple(feature.path.step)


def _edges(bucket: Any) -> tuple[float, float]:
    return bucket.low_value, bucket.high_value
