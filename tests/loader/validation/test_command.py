"""`keras-het validate` as a user calls it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)

from keras_het.launch.command_line import main
from keras_het.loader.validation import (
    infer_schema,
    read_schema,
    set_comparison_thresholds,
    statistics_of_dataset,
    write_schema,
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


def write(statistics: Any, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(statistics.SerializeToString())


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
    arguments = ["validate", f"A={fast}", f"B={slow}", "--categorical", "label"]
    assert main([*arguments, "--write-schema", str(tmp_path / "schema.pbtxt")]) == 1
    output = capsys.readouterr().out
    assert "schema: inferred from A" in output
    assert "! label: L-infinity distance of B from A 0.5000 > 0.1" in output
    assert "  pixel: Jensen-Shannon distance of B from A" in output

    assert main([*arguments, "--reference", "B"]) == 1
    assert "of A from B" in capsys.readouterr().out
    schema = read_schema(str(tmp_path / "schema.pbtxt"))
    set_comparison_thresholds(schema, categorical=0.6, numeric=1)
    write_schema(schema, str(tmp_path / "schema.pbtxt"))
    assert main([*arguments, "--schema", str(tmp_path / "schema.pbtxt")]) == 0


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
        write(statistics, tmp_path / f"epoch-000{epoch}-replica-{replica}.stats")
    write_schema(schema, tmp_path / "schema.pbtxt")
    arguments = ["validate", str(tmp_path), "--schema", str(tmp_path / "schema.pbtxt")]
    assert main([*arguments, "--epoch", "1"]) == 0
    capsys.readouterr()
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert "replica 0: 500 rows" in output and "replica 1: 400 rows" in output
    assert "! x: Jensen-Shannon distance of replica 1 from replica 0" in output
    assert main(["validate", str(tmp_path / "epoch-0002-replica-1.stats")]) == 0


def test_directories_of_two_trainings_are_distinguished_by_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, value in (("before", 0), ("after", 5)):
        rows = {"x": np.random.default_rng(0).normal(value, 1, 500 + value)}
        folders.append(f"{name}={tmp_path / name}")
        write(statistics_of_dataset(rows), tmp_path / name / "epoch-0001-replica-0.stats")
    assert main(["validate", *(str(tmp_path / name) for name in ("before", "after"))]) == 2
    assert "called replica 0; give them names: NAME=DATA" in capsys.readouterr().err
    assert main(["validate", *folders]) == 1
    output = capsys.readouterr().out
    assert "! x: Jensen-Shannon distance of before replica 0 from after replica 0" in output


def test_wrong_usage(fast: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.tfrecord"
    broken.write_bytes(fast.read_bytes()[:-3])
    for arguments, message in (
        (["nothing.tfrecord"], "No file matches"),
        ([str(tmp_path), "--epoch", "3"], "no statistics of epoch 3"),
        ([str(tmp_path)], "no statistics of epoch None"),
        ([str(fast), str(fast)], "Two datasets are called fast"),
        ([str(fast), "--reference", "slow"], "no data 'slow'; there is fast"),
        ([str(fast), "--schema", str(tmp_path / "none")], "none"),
        (
            [str(fast), "--write-schema", str(fast / "folder" / "schema.pbtxt")],
            "is not a directory",
        ),
        ([str(broken)], "truncated"),
    ):
        assert main(["validate", *arguments]) == 2
        assert message in capsys.readouterr().err
