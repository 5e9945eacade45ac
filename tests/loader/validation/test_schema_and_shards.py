"""Anomalies, and distances between shards against their formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)

from keras_het.loader.validation import (
    compare_shards,
    find_anomalies,
    infer_schema,
    read_schema,
    set_comparison_thresholds,
    statistics_of_dataset,
    write_schema,
)


def data(rows: int = 2000, seed: int = 0, rome: float = 0.3, shift: float = 0.0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "age": random.normal(40 + shift, 10, rows).astype(np.float32),
        "city": random.choice(["Oslo", "Rome"], rows, p=[1 - rome, rome]),
        "label": random.choice(10, rows),
    }


def statistics(**options: Any) -> Any:
    return statistics_of_dataset(data(**options), categorical=["label"])


def schema(**options: Any) -> Any:
    return infer_schema(statistics(), **options)


def found(changed: dict[str, Any], **options: Any) -> dict[str, str]:
    expected = schema(**options)
    anomalies = find_anomalies(statistics_of_dataset(changed, schema=expected), expected)
    return {anomaly.feature: anomaly.reason for anomaly in anomalies}


def test_data_like_that_of_the_schema_has_no_anomaly() -> None:
    assert found(data(seed=1)) == {}


def test_each_anomaly_is_found() -> None:
    right = data(seed=1)
    nan = np.where(np.arange(2000) == 7, np.nan, right["age"])
    infinite = np.where(np.arange(2000) == 7, np.inf, right["age"])
    paris = np.where(np.arange(2000) == 7, "Paris", right["city"])
    for changed, feature, reason in (
        ({"age": nan}, "age", "Invalid values"),
        ({"age": infinite}, "age", "Invalid values"),
        ({"age": right["age"].astype(int)}, "age", "Unexpected data type"),
        ({"age": np.stack([right["age"]] * 2, 1)}, "age", "Feature shape dropped"),
        ({"city": paris}, "city", "Unexpected string values"),
        ({"label": right["label"] + 5}, "label", "Out-of-range values"),
        ({"new": right["age"]}, "new", "New column"),
    ):
        reasons = found({**right, **changed})
        assert set(reasons) == {feature}, reasons
        assert reason in reasons[feature]
    del right["label"]
    assert found(right) == {"label": "Column dropped"}


def test_no_rows_are_an_anomaly() -> None:
    nothing = find_anomalies(statistics_of_dataset([]), schema())
    assert "No data" in [anomaly.reason for anomaly in nothing]


def test_ranges_where_they_are_wanted() -> None:
    changed = {**data(), "age": 255 * data()["age"]}
    assert found(changed) == {}
    assert found(changed, numeric_ranges=True) == {"age": "Out-of-range values"}
    assert found(data(), numeric_ranges=True) == {}


@pytest.mark.parametrize("numeric_ranges", [True, False])
def test_many_categories_are_categories(numeric_ranges: bool) -> None:
    """As the classes of ImageNet: more than make a domain."""
    labels = np.arange(4000) % 1000
    known = infer_schema(
        statistics_of_dataset({"label": labels}, categorical=["label"]),
        numeric_ranges=numeric_ranges,
    )
    set_comparison_thresholds(known, categorical=0.3)
    shards = {
        name: statistics_of_dataset({"label": shard}, schema=known)
        for name, shard in (("fast", labels), ("slow", labels[labels < 500]))
    }
    assert find_anomalies(shards["fast"], known) == []
    (distance,) = compare_shards(shards, known)
    assert distance.measure == "L-infinity"
    assert distance.value == pytest.approx(1 / 500 - 1 / 1000, abs=1e-6)


def test_what_holds_no_number_has_no_range() -> None:
    nothing = {
        "missing": np.full(4, np.nan, np.float32),
        "empty": tf.ragged.constant([[], [], [], []], tf.int64),
        "some": np.array([1.0, np.nan, 3.0, np.nan], np.float32),
    }
    known = infer_schema(statistics_of_dataset(nothing), numeric_ranges=True)
    domains = {feature.name: feature for feature in known.feature}
    assert not domains["missing"].float_domain.HasField("max")
    assert not domains["empty"].int_domain.HasField("max")
    assert (domains["some"].float_domain.min, domains["some"].float_domain.max) == (1.0, 3.0)


def test_the_greatest_integers_have_a_range() -> None:
    numbers = {"id": np.array([-(2**63), 5, 2**63 - 1])}
    known = infer_schema(statistics_of_dataset(numbers), numeric_ranges=True)
    assert find_anomalies(statistics_of_dataset(numbers), known) == []
    small = infer_schema(statistics_of_dataset({"id": np.arange(9)}), numeric_ranges=True)
    (anomaly,) = find_anomalies(statistics_of_dataset(numbers), small)
    assert "Out-of-range" in anomaly.reason


def test_schemas_are_text_files(tmp_path: Path) -> None:
    expected = set_comparison_thresholds(schema())
    write_schema(expected, tmp_path / "schema.pbtxt")
    assert read_schema(tmp_path / "schema.pbtxt") == expected
    assert 'name: "city"' in (tmp_path / "schema.pbtxt").read_text()


def test_l_infinity_is_the_greatest_difference_of_frequencies() -> None:
    expected = set_comparison_thresholds(schema(), categorical=0.2, numeric=0.02)
    fast, slow = data(seed=1), data(rows=700, seed=2, rome=0.8)
    shards = {
        name: statistics_of_dataset(shard, schema=expected)
        for name, shard in (("fast", fast), ("slow", slow))
    }
    distances = {distance.feature: distance for distance in compare_shards(shards, expected)}
    assert set(distances) == {"age", "city", "label"}
    for name, domain in (("city", ["Oslo", "Rome"]), ("label", range(10))):
        frequencies = [[np.mean(shard[name] == v) for v in domain] for shard in (fast, slow)]
        largest = np.abs(np.subtract(*frequencies)).max()
        distance = distances[name]
        assert (distance.shard, distance.reference) == ("slow", "fast")
        assert (distance.measure, distance.threshold) == ("L-infinity", 0.2)
        assert distance.value == pytest.approx(largest, abs=1e-6)
    assert distances["city"].is_exceeded and not distances["label"].is_exceeded
    assert str(distances["city"]).startswith("city: L-infinity distance of slow from fast 0.")


def test_jensen_shannon_grows_with_the_shift() -> None:
    expected = set_comparison_thresholds(schema(), numeric=0.05)
    values = []
    for shift in (0, 10, 1000):
        shards = {"a": statistics(seed=1), "b": statistics(rows=1000, seed=2, shift=shift)}
        found = {distance.feature: distance for distance in compare_shards(shards, expected)}
        assert found["age"].measure == "Jensen-Shannon"
        values.append(found["age"].value)
    assert values[0] < 0.05 < values[1] < values[2]
    assert values[2] == pytest.approx(1, abs=0.01), "they have nothing in common"


def without_values(how: str) -> dict[str, Any]:
    if how == "no columns":
        return {"label": np.arange(50)}
    is_nan = how == "NaN"
    return {
        "city": tf.ragged.constant([[]] * 50, tf.string),
        "age": np.full(50, np.nan, np.float32) if is_nan else tf.ragged.constant([[]] * 50),
    }


@pytest.mark.parametrize("is_reference", [True, False])
@pytest.mark.parametrize("how", ["NaN", "no values", "no columns"])
def test_what_only_one_of_two_has_is_as_far_as_can_be(how: str, is_reference: bool) -> None:
    """TFDV has no distance of numbers then, and of categories that of the most frequent one."""
    nothing = without_values(how)
    expected = set_comparison_thresholds(schema(), of_features={"label": None, "age": 0.5})
    shards = {"full": statistics(), "none": statistics_of_dataset(nothing, schema=expected)}
    reference, shard = ("none", "full") if is_reference else ("full", "none")
    distances = compare_shards(shards, expected, reference)
    assert [(each.shard, each.reference) for each in distances] == [(shard, reference)] * 2
    assert [(each.feature, each.measure, each.value, each.threshold) for each in distances] == [
        ("city", "L-infinity", 1.0, pytest.approx(0.1)),
        ("age", "Jensen-Shannon", 1.0, 0.5),
    ]
    nowhere = {name: shards["none"] for name in "ab"}
    assert compare_shards(nowhere, expected) == []


def test_features_may_be_left_out() -> None:
    thresholds = {"age": None, "city": 0.3}
    expected = set_comparison_thresholds(
        set_comparison_thresholds(schema()), of_features=thresholds
    )
    found = compare_shards({"a": statistics(), "b": statistics(rows=500)}, expected)
    assert {each.feature: each.threshold for each in found} == {"city": 0.3, "label": 0.1}


def test_the_worst_comes_first_and_the_reference_may_be_chosen() -> None:
    expected = set_comparison_thresholds(schema(), of_features={"age": 0.9})
    shards = {
        "a": statistics(rows=50),
        "b": statistics(rows=500, rome=0.9),
        "c": statistics(rows=0),
    }
    distances = compare_shards(shards, expected, reference="a")
    assert {(distance.shard, distance.reference) for distance in distances} == {("b", "a")}
    excess = [distance.value - distance.threshold for distance in distances]
    assert excess == sorted(excess, reverse=True)
    assert distances[0].feature == "city"
    with pytest.raises(ValueError, match="no reference with rows"):
        compare_shards(shards, expected, reference="c")


def test_comparisons_without_thresholds() -> None:
    with pytest.raises(ValueError, match="set_comparison_thresholds"):
        compare_shards({"a": statistics(), "b": statistics()}, schema())


def test_thresholds_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 1. Received: 2"):
        set_comparison_thresholds(schema(), numeric=2)
    with pytest.raises(ValueError, match=r"no feature \['weight'\]"):
        set_comparison_thresholds(schema(), of_features={"weight": 0.1})
