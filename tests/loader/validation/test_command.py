"""`keras-het validate` as a user calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)

from tensorflow_metadata.proto.v0 import schema_pb2

from keras_het.launch.command_line import main
from keras_het.loader.validation import (
    infer_schema,
    read_schema,
    set_comparison_thresholds,
    statistics_of_dataset,
    statistics_of_tfrecord,
    write_schema,
    write_statistics,
)


def write_examples(path: Path, labels: list[int]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for index, label in enumerate(labels):
            feature = {
                "pixel": tf.train.Feature(float_list=tf.train.FloatList(value=[index % 7])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())
    return path


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "fast.tfrecord", [0, 1, 2, 3] * 50)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "slow.tfrecord", [0, 0, 0, 3] * 20)


def test_a_schema_is_inferred_and_used(
    fast: Path, slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.pbtxt"
    arguments = ["validate", str(fast), "--categorical", "label", "--write-schema", str(schema)]
    assert main(arguments) == 0
    assert "fast: 200 rows, 0 anomalies" in capsys.readouterr().out
    label = next(feature for feature in read_schema(schema).feature if feature.name == "label")
    assert (label.int_domain.min, label.int_domain.max) == (0, 3)

    assert main(["validate", str(slow), "--schema", str(schema)]) == 0
    wrong = write_examples(tmp_path / "wrong.tfrecord", [0, 9])
    assert main(["validate", str(wrong), "--schema", str(schema)]) == 1
    output = capsys.readouterr().out
    assert "wrong: 2 rows, 1 anomalies" in output
    assert "label: Out-of-range values" in output


def test_shards_are_compared(
    fast: Path, slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    arguments = ["validate", f"A={fast}", f"B={slow}", "--categorical", "label"]
    assert main([*arguments, "--html", str(report)]) == 1
    output = capsys.readouterr().out
    assert "schema: inferred from A" in output
    assert "! label: L-infinity distance of B from A 0.5000 > 0.1" in output
    assert "  pixel: Jensen-Shannon distance of B from A" in output
    assert "facets-overview" in report.read_text()

    assert main([*arguments, "--categorical-threshold", "0.6", "--numeric-threshold", "1"]) == 0
    assert main([*arguments, "--reference", "B", "--categorical-threshold", "0.4"]) == 1
    assert "of A from B" in capsys.readouterr().out


def test_patterns_of_partitioned_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("01", "02"):
        (tmp_path / f"day={day}").mkdir()
        write_examples(tmp_path / f"day={day}" / "part.tfrecord", [0, 1] * 9)
    pattern = str(tmp_path / "day=*" / "part.tfrecord")
    assert main(["validate", pattern]) == 0
    assert "part: 36 rows" in capsys.readouterr().out
    assert main(["validate", f"both={pattern}"]) == 0
    assert "both: 36 rows" in capsys.readouterr().out


def test_directories_of_the_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = None
    for epoch, replica, value in ((1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 5)):
        rows = {"x": np.random.default_rng(replica).normal(value, 1, 500 - 100 * replica)}
        statistics = statistics_of_dataset(rows)
        schema = schema or infer_schema(statistics)
        write_statistics(statistics, tmp_path / f"epoch-000{epoch}-replica-{replica}.stats")
    write_schema(schema, tmp_path / "schema.pbtxt")
    arguments = ["validate", str(tmp_path), "--schema", str(tmp_path / "schema.pbtxt")]
    assert main([*arguments, "--epoch", "1"]) == 0
    capsys.readouterr()
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert "replica 0: 500 rows" in output and "replica 1: 400 rows" in output
    assert "! x: Jensen-Shannon distance of replica 1 from replica 0" in output
    assert "! x: Jensen-Shannon distance of replica 1 from the epoch before" in output
    assert "  x: Jensen-Shannon distance of replica 0 from the epoch before 0.0000" in output
    assert main(["validate", str(tmp_path / "epoch-0002-replica-1.stats")]) == 0


def test_directories_of_two_trainings_are_told_apart_by_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, value in (("before", 0), ("after", 5)):
        rows = {"x": np.random.default_rng(0).normal(value, 1, 500 + value)}
        folders.append(f"{name}={tmp_path / name}")
        write_statistics(
            statistics_of_dataset(rows), tmp_path / name / "epoch-0001-replica-0.stats"
        )
    assert main(["validate", *(str(tmp_path / name) for name in ("before", "after"))]) == 2
    assert "called replica 0; give them names: NAME=DATA" in capsys.readouterr().err
    assert main(["validate", *folders]) == 1
    output = capsys.readouterr().out
    assert "! x: Jensen-Shannon distance of before replica 0 from after replica 0" in output


def thresholds_after(schema: Any, folder: Path, *options: str) -> dict[str, dict[str, float]]:
    """The thresholds with which the command has compared, by kind and feature."""
    write_schema(schema, folder / "schema.pbtxt")
    data = write_examples(folder / "data.tfrecord", [0, 1, 2, 3] * 9)
    paths = ["--schema", str(folder / "schema.pbtxt"), "--write-schema", str(folder / "used.pbtxt")]
    assert main(["validate", str(data), *paths, *options]) == 0
    used: dict[str, dict[str, float]] = {"skew": {}, "drift": {}}
    for feature in read_schema(folder / "used.pbtxt").feature:
        for kind, thresholds in used.items():
            if feature.HasField(f"{kind}_comparator"):
                comparator = getattr(feature, f"{kind}_comparator")
                numeric = comparator.jensen_shannon_divergence.threshold
                thresholds[feature.name] = round(numeric or comparator.infinity_norm.threshold, 6)
    return used


def schema_of(folder: Path) -> Any:
    data = write_examples(folder / "right.tfrecord", [0, 1, 2, 3] * 9)
    return infer_schema(statistics_of_tfrecord(data, categorical=["label"]))


def test_thresholds_of_the_schema_stay(tmp_path: Path) -> None:
    both = {"pixel": 0.1, "label": 0.1}
    assert thresholds_after(schema_of(tmp_path), tmp_path) == {"skew": both, "drift": both}
    drift = set_comparison_thresholds(
        schema_of(tmp_path), categorical=0.3, of_features={"pixel": None}, kinds=["drift"]
    )
    assert thresholds_after(drift, tmp_path) == {"skew": {"label": 0.1}, "drift": {"label": 0.3}}
    skew = set_comparison_thresholds(
        schema_of(tmp_path), of_features={"label": 0.3, "pixel": 0.4}, kinds=["skew"]
    )
    assert thresholds_after(skew, tmp_path) == {"skew": {"label": 0.3, "pixel": 0.4}, "drift": {}}


def test_thresholds_of_options_are_of_features_that_the_schema_compares(tmp_path: Path) -> None:
    numeric = ("--numeric-threshold", "0.5")
    skew = set_comparison_thresholds(
        schema_of(tmp_path), of_features={"pixel": 0.4}, kinds=["skew"]
    )
    skew.feature.add(name="extreme", type=schema_pb2.FLOAT)
    expected = {"skew": {"pixel": 0.5, "label": 0.1}, "drift": {}}
    assert thresholds_after(skew, tmp_path, *numeric) == expected
    # None of its numbers is compared: then all are.
    label = set_comparison_thresholds(schema_of(tmp_path), of_features={"pixel": None})
    both = {"pixel": 0.5, "label": 0.1}
    assert thresholds_after(label, tmp_path, *numeric) == {"skew": both, "drift": both}
    options = (*numeric, "--categorical-threshold", "0.2")
    both = {"pixel": 0.5, "label": 0.2}
    assert thresholds_after(schema_of(tmp_path), tmp_path, *options) == {
        "skew": both,
        "drift": both,
    }


def test_wrong_usage(fast: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.tfrecord"
    broken.write_bytes(fast.read_bytes()[:-3])
    for arguments, message in (
        (["nothing.tfrecord"], "No file matches"),
        ([str(tmp_path), "--epoch", "3"], "no statistics of epoch 3"),
        ([str(tmp_path)], "no statistics of epoch None"),
        ([str(fast), str(fast)], "Two data sets are called fast"),
        ([str(fast), "--reference", "slow"], "no data 'slow'; there is fast"),
        ([str(fast), "--schema", str(tmp_path / "none")], "none"),
        ([str(fast), "--numeric-threshold", "7"], "from 0 to 1"),
        (
            [str(fast), "--write-schema", str(fast / "folder" / "schema.pbtxt")],
            "is not a directory",
        ),
        ([str(broken)], "truncated"),
    ):
        assert main(["validate", *arguments]) == 2
        assert message in capsys.readouterr().err
