"""Features of which only one of two shards has values, for which TFDV finds no distance."""

from __future__ import annotations

from typing import Any

from keras_het.loader.validation.tfdv_adapter import Schema, Statistics

_MEASURES = {
    "infinity_norm": "L_INFTY",
    "jensen_shannon_divergence": "JENSEN_SHANNON_DIVERGENCE",
}


def one_sided_features(
    statistics: Statistics, other: Statistics, schema: Schema, kind: str
) -> dict[str, tuple[str, float]]:
    """Which features with a comparator one shard has values of, and the other one has none.

    Nothing is as far from something as can be. TFDV has no distance of numbers then, and of
    categories the frequency of the most frequent one, which is small where there are many.

    Args:
        statistics: of one shard.
        other: of the other one.
        schema: with comparators.
        kind: "skew" or "drift": whose comparators count.

    Returns:
        Names to the type of the measure, as TFDV calls it, and the threshold.
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
    """Names of the features that have a value other than NaN."""
    features = statistics.datasets[0].features if statistics.datasets else ()
    return {".".join(feature.path.step) for feature in features if _has_values(feature)}


def _has_values(feature: Any) -> bool:
    kind = feature.WhichOneof("stats")
    if kind is None:
        return False
    found = getattr(feature, kind)
    histograms = found.histograms if kind == "num_stats" else ()
    no_numbers = max((histogram.num_nan for histogram in histograms), default=0)
    return bool(found.common_stats.tot_num_values > no_numbers)
