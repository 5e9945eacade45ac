"""Expected form of data: inferred, given thresholds, written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tensorflow as tf
from google.protobuf import text_format

from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    schema_pb2,
    statistics_pb2,
    tfdv,
)

_KINDS = ("skew", "drift")
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
    by_name = {
        feature.path.step[0]: feature
        for feature in statistics.datasets[0].features
        if len(feature.path.step) == 1
    }
    for feature in schema.feature:
        if feature.type == schema_pb2.INT and feature.WhichOneof("domain_info") == "domain":
            _make_integer_categories(schema, feature)
        elif feature.type == schema_pb2.INT and _has_categories(by_name[feature.name]):
            # more than `max_categories`: TFDV then forgets what they are
            feature.int_domain.is_categorical = True
        elif feature.type == schema_pb2.FLOAT:
            _disallow_what_is_no_number(feature, by_name[feature.name])
        if numeric_ranges and _has_numbers(by_name[feature.name]):
            _set_range(feature, by_name[feature.name])
    return schema


def set_comparison_thresholds(
    schema: Schema,
    *,
    categorical: float | None = 0.1,
    numeric: float | None = 0.1,
    of_features: Mapping[str, float | None] | None = None,
    kinds: Iterable[str] = _KINDS,
) -> Schema:
    """Set the distance from which on two shards of the data count as different.

    For categorical features it is the L-infinity distance of the frequencies p and q,
    max_v |p(v) − q(v)|; for numeric ones the Jensen-Shannon divergence of the histograms,
    ½ KL(p‖m) + ½ KL(q‖m), m = (p + q) / 2, to base 2. Both are from 0 to 1. Shards of n rows differ
    by chance already: L-infinity by about 1/√n. TFDV's histograms have ten buckets over each
    shard's own range and spread the content of a bucket evenly over it, so features with nearly
    equal values seem far apart if only their extremes differ: leave them out.

    Args:
        schema: changed in place.
        categorical: threshold of the L-infinity distance; None leaves it as it is.
        numeric: threshold of the Jensen-Shannon divergence; None leaves it as it is.
        of_features: thresholds of single features instead; None does not compare the feature.
        kinds: "skew" (between the shards of one epoch) and "drift" (of a shard between epochs).

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
        if chosen.get(feature.name, 0) is None:
            for kind in kinds:
                feature.ClearField(f"{kind}_comparator")
            continue
        is_category = is_categorical(feature)
        threshold = chosen.get(feature.name, categorical if is_category else numeric)
        for kind in kinds if threshold is not None else ():
            comparator = getattr(feature, f"{kind}_comparator")
            comparator.Clear()
            measure = "infinity_norm" if is_category else "jensen_shannon_divergence"
            getattr(comparator, measure).threshold = threshold
    return schema


def is_categorical(feature: schema_pb2.Feature) -> bool:
    """Tell whether a feature of a schema is categorical: strings, and integers declared as such."""
    return feature.type == schema_pb2.BYTES or feature.int_domain.is_categorical


def read_schema(path: str | Path) -> Schema:
    """Read a schema.

    Args:
        path: text file written by `write_schema` or TFDV.

    Raises:
        ValueError: if there is no such file, or it holds something else.
    """
    try:
        return tfdv.load_schema_text(str(path))
    except (tf.errors.OpError, text_format.ParseError) as error:
        raise ValueError(
            f"{path} holds no schema: {error}. Expected a text file of "
            "keras_het.loader.validation.write_schema or TFDV."
        ) from error


def write_schema(schema: Schema, path: str | Path) -> None:
    """Write a schema as text that can be corrected by hand.

    Args:
        schema: the schema.
        path: the file, usually called `schema.pbtxt`.
    """
    tf.io.gfile.makedirs(str(path).rpartition("/")[0] or ".")
    tfdv.write_schema_text(schema, str(path))


def _make_integer_categories(schema: Schema, feature: schema_pb2.Feature) -> None:
    """Set integer categories: TFDV infers a domain of strings for them, which it then refuses."""
    domain = next(d for d in schema.string_domain if d.name == feature.domain)
    values = [int(value) for value in domain.value]
    schema.string_domain.remove(domain)
    feature.int_domain.CopyFrom(
        schema_pb2.IntDomain(min=min(values), max=max(values), is_categorical=True)
    )


def _has_numbers(statistics: statistics_pb2.FeatureNameStatistics) -> bool:
    """Tell whether a feature has least and greatest values: without them, TFDV says 0."""
    numbers = statistics.num_stats
    no_numbers = max((histogram.num_nan for histogram in numbers.histograms), default=0)
    return bool(numbers.common_stats.tot_num_values > no_numbers)


def _has_categories(statistics: statistics_pb2.FeatureNameStatistics) -> bool:
    return bool(statistics.WhichOneof("stats") == "string_stats")


def _disallow_what_is_no_number(
    feature: schema_pb2.Feature, statistics: statistics_pb2.FeatureNameStatistics
) -> None:
    if not any(histogram.num_nan for histogram in statistics.num_stats.histograms):
        feature.float_domain.disallow_nan = True
    extremes = (statistics.num_stats.min, statistics.num_stats.max)
    if all(abs(value) != float("inf") for value in extremes):
        feature.float_domain.disallow_inf = True


def _set_range(
    feature: schema_pb2.Feature, statistics: statistics_pb2.FeatureNameStatistics
) -> None:
    low, high = statistics.num_stats.min, statistics.num_stats.max
    if feature.type == schema_pb2.FLOAT:
        feature.float_domain.min, feature.float_domain.max = low, high
    elif feature.type == schema_pb2.INT and not feature.int_domain.is_categorical:
        feature.int_domain.min = int(low)
        # TFDV counts in float64, in which the greatest integer is rounded up
        feature.int_domain.max = min(int(high), _GREATEST)
