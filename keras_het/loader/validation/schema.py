"""What data should look like, how they deviate from it, and how shards differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from keras_het.loader.validation.statistics import features_of, has_values, num_rows
from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    anomalies_pb2,
    schema_pb2,
    tfdv,
)

_GREATEST = 2**63 - 1


def infer_schema(
    statistics: Statistics, *, numeric_ranges: bool = False, max_categories: int = 100
) -> Schema:
    """Infer what the data should look like: types, presence, shapes, domains.

    It is a proposal by TFDV, to be reviewed and corrected. If the data holds no NaN and no infinite
    value, neither is allowed.

    Args:
        statistics: statistics of correct data.
        numeric_ranges: whether values must be between the least and the greatest value of these
            statistics; use it if ranges are known to be fixed, as in images.
        max_categories: maximum number of different strings that make a domain.

    Returns:
        A `tensorflow_metadata.proto.v0.schema_pb2.Schema`.

    Reference: `tensorflow_data_validation.infer_schema`.
    """
    schema = tfdv.infer_schema(statistics, max_string_domain_size=max_categories)
    by_name = features_of(statistics)
    for feature in schema.feature:
        found = by_name[feature.name]
        numbers, has_range = found.num_stats, numeric_ranges and has_values(found)
        if feature.type == schema_pb2.FLOAT:
            domain = feature.float_domain
            if not any(histogram.num_nan for histogram in numbers.histograms):
                domain.disallow_nan = True
            if math.inf not in (-numbers.min, numbers.max):
                domain.disallow_inf = True
            if has_range:
                domain.min, domain.max = numbers.min, numbers.max
        elif feature.type == schema_pb2.INT and found.HasField("string_stats"):
            _make_integer_categories(schema, feature)
        elif feature.type == schema_pb2.INT and has_range:
            # TFDV counts in float64, in which the greatest integer is rounded up
            feature.int_domain.min = int(numbers.min)
            feature.int_domain.max = min(int(numbers.max), _GREATEST)
    return schema


def set_comparison_thresholds(
    schema: Schema,
    *,
    categorical: float | None = 0.1,
    numeric: float | None = 0.1,
    of_features: Mapping[str, float | None] | None = None,
) -> Schema:
    """Set the distance from which on two shards of the data count as different.

    For categorical features it is the L-infinity distance of the frequencies p and q,
    max_v |p(v) − q(v)|; for numeric ones the Jensen-Shannon divergence of the histograms,
    ½ KL(p‖m) + ½ KL(q‖m), m = (p + q) / 2, to base 2. Both are from 0 to 1. Shards of n rows differ
    by chance already: L-infinity by about 1/√n. TFDV's histograms have ten buckets over each
    shard's own range and spread the content of a bucket evenly over it, so features with nearly
    equal values seem far apart if only their extremes differ, as do a constant and what is nearly
    constant: leave them out.

    Args:
        schema: changed in place.
        categorical: threshold of the L-infinity distance; None leaves it as it is.
        numeric: threshold of the Jensen-Shannon divergence; None leaves it as it is.
        of_features: thresholds of single features instead; None does not compare the feature.

    Returns:
        The schema.

    Raises:
        ValueError: if a threshold is not from 0 to 1, or a feature is not in the schema.

    Reference: https://www.tensorflow.org/tfx/data_validation/get_started
    """
    chosen = dict(of_features or {})
    unknown = set(chosen) - {feature.name for feature in schema.feature}
    if unknown:
        raise ValueError(f"The schema has no feature {sorted(unknown)}.")
    for threshold in (categorical, numeric, *chosen.values()):
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"A threshold must be from 0 to 1. Received: {threshold}.")
    for feature in schema.feature:
        of_type = categorical if is_categorical(feature) else numeric
        threshold = chosen.get(feature.name, of_type)
        if threshold is not None:
            feature.skew_comparator.Clear()
            measure = "infinity_norm" if is_categorical(feature) else "jensen_shannon_divergence"
            getattr(feature.skew_comparator, measure).threshold = threshold
        elif feature.name in chosen:
            feature.ClearField("skew_comparator")
    return schema


def write_schema(schema: Schema, path: str | Path) -> None:
    """Write a schema as text that can be corrected by hand.

    Args:
        schema: the schema.
        path: the file, usually called `schema.pbtxt`.
    """
    tf.io.gfile.makedirs(str(path).rpartition("/")[0] or ".")
    tfdv.write_schema_text(schema, str(path))


def is_categorical(feature: schema_pb2.Feature) -> bool:
    """Tell whether a feature of a schema is categorical: strings, and integers declared as such."""
    return feature.type == schema_pb2.BYTES or feature.int_domain.is_categorical


def _make_integer_categories(schema: Schema, feature: schema_pb2.Feature) -> None:
    """Replace the domain of strings that TFDV infers for integers, and then refuses."""
    domain = next((d for d in schema.string_domain if d.name == feature.domain), None)
    feature.int_domain.is_categorical = True
    if domain is not None:  # TFDV forgets more than `max_categories`
        values = [int(value) for value in domain.value]
        feature.int_domain.min, feature.int_domain.max = min(values), max(values)
        schema.string_domain.remove(domain)


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
        anomalies: anomalies in this worker's data; empty if only others found some.
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
