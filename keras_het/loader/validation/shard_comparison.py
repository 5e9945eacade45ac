"""How far the shards of the data that different workers consume are from each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keras_het.loader.validation.constant_features import with_comparable_constants
from keras_het.loader.validation.one_sided_features import (
    features_with_values,
    one_sided_features,
)
from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    anomalies_pb2,
    tfdv,
)

_NAMES = {"L_INFTY": "L-infinity", "JENSEN_SHANNON_DIVERGENCE": "Jensen-Shannon"}


@dataclasses.dataclass(frozen=True)
class ShardDistance:
    """How far one feature is apart in two shards.

    Args:
        shard: name of the shard.
        reference: name of what it was compared with.
        feature: name of the feature.
        measure: "L-infinity" or "Jensen-Shannon".
        value: the distance, from 0 to 1; 1 if only one of the two has values.
        threshold: of the schema.
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
    """Measures the skew between shards that were consumed at the same time.

    Every shard is compared with the reference, in each feature for which the schema has a skew
    comparator. Shards without rows are left out.

    Args:
        shards: names to statistics.
        schema: with thresholds, see `set_comparison_thresholds`.
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
    """Measures how far data has moved from what it was, in an earlier epoch or on an earlier day.

    Args:
        statistics: of the present data.
        previous: of the earlier data.
        schema: with thresholds of drift, see `set_comparison_thresholds`.
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
    """What TFDV says of data: its anomalies, and its distances from other data.

    Args:
        statistics: of the data.
        schema: with comparators.
        other: statistics of the other data.
        kind: "skew" or "drift": whose comparators are used.
    """
    if other is None:
        return tfdv.validate_statistics(statistics, schema)
    before = with_comparable_constants(other, statistics)
    now = with_comparable_constants(statistics, other)
    role = "serving_statistics" if kind == "skew" else "previous_statistics"
    return tfdv.validate_statistics(now, schema, **{role: before})


def num_rows(statistics: Statistics) -> int:
    """Rows of the data of these statistics."""
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
    # Of what nobody has TFDV finds that NaN is far from NaN.
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
