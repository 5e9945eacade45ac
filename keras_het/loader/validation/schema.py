"""Expected form of data: inferred, given thresholds, written down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from keras_het.loader.validation.statistics import features_of, has_values
from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
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
