"""Statistics against those of TFDV's own functions and of numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)
import pandas as pd
import tensorflow_data_validation as tfdv

from keras_het.loader.validation import (
    StatisticsBuilder,
    infer_schema,
    statistics_of_dataset,
    statistics_of_tfrecord,
)
from keras_het.loader.validation import statistics as module

ROWS = 1000


def table(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "age": random.normal(40, 10, rows).astype(np.float32),
        "visits": random.poisson(3, rows),
        "city": random.choice([b"Oslo", b"Rome", b"Lima"], rows, p=[0.5, 0.3, 0.2]),
    }


def by_name(statistics: Any) -> dict[str, Any]:
    return {feature.path.step[0]: feature for feature in statistics.datasets[0].features}


def test_a_table_has_the_statistics_that_tfdv_gives_its_data_frame() -> None:
    ours = statistics_of_dataset(table(), name="table")
    frame = pd.DataFrame({**table(), "city": table()["city"].astype(object)})
    theirs = tfdv.generate_statistics_from_dataframe(frame)
    assert ours.datasets[0].num_examples == ROWS
    assert ours.datasets[0].name == "table"
    assert set(by_name(ours)) == set(table())
    for name, feature in by_name(theirs).items():
        assert by_name(ours)[name] == feature


@pytest.mark.parametrize("rows_at_once", [1, 300, 1 << 20])
def test_pieces_add_up(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
    data = tf.data.Dataset.from_tensor_slices(table()).batch(96)
    features = by_name(statistics_of_dataset(data, max_batches=7))
    rows = 7 * 96
    age = features["age"].num_stats
    assert age.common_stats.num_non_missing == rows
    np.testing.assert_allclose(age.mean, table()["age"][:rows].astype(float).mean(), 1e-6)
    np.testing.assert_allclose(age.std_dev, table()["age"][:rows].astype(float).std(), 1e-6)
    cities, counts = np.unique(table()["city"][:rows], return_counts=True)
    found = {v.value.encode(): v.frequency for v in features["city"].string_stats.top_values}
    assert found == dict(zip(cities, counts, strict=True))


def write_examples(path: Path, data: dict[str, np.ndarray]) -> None:
    options = tf.io.TFRecordOptions("GZIP" if path.suffix == ".gz" else "")
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for age, visits, city in zip(*data.values(), strict=True):
            feature = {
                "age": tf.train.Feature(float_list=tf.train.FloatList(value=[age])),
                "visits": tf.train.Feature(int64_list=tf.train.Int64List(value=[visits])),
                "city": tf.train.Feature(bytes_list=tf.train.BytesList(value=[city])),
            }
            if visits == 0:
                del feature["age"]
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def test_tfrecord_files_have_the_statistics_that_tfdv_gives_them(tmp_path: Path) -> None:
    write_examples(tmp_path / "a-0.tfrecord", table())
    ours = statistics_of_tfrecord(tmp_path / "a-0.tfrecord")
    theirs = tfdv.generate_statistics_from_tfrecord(str(tmp_path / "a-0.tfrecord"))
    missing = int((table()["visits"] == 0).sum())
    assert missing > 0
    assert by_name(ours)["age"].num_stats.common_stats.num_missing == missing
    assert by_name(ours) == by_name(theirs)


def test_patterns_and_compressed_files(tmp_path: Path) -> None:
    write_examples(tmp_path / "a-0.tfrecord", table(20))
    write_examples(tmp_path / "a-1.tfrecord.gz", table(30, seed=1))
    assert statistics_of_tfrecord(tmp_path / "a-*").datasets[0].num_examples == 50


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No file matches"):
        statistics_of_tfrecord(tmp_path / "nothing-*")
    (tmp_path / "text").write_text("not a TFRecord file, but long enough to be read as one")
    with pytest.raises(ValueError, match="text is not a TFRecord file"):
        statistics_of_tfrecord(tmp_path / "text")
    with tf.io.TFRecordWriter(str(tmp_path / "bytes")) as writer:
        writer.write(b"not an example")
    with pytest.raises(ValueError, match=r"bytes is not a TFRecord file of tf\.train\.Examples"):
        statistics_of_tfrecord(tmp_path / "bytes")


def test_integers_are_categories_where_it_is_said() -> None:
    batch = (np.random.default_rng(0).random((9, 2, 2, 1)), np.arange(9) % 3)
    plain = by_name(statistics_of_dataset([batch]))
    declared = statistics_of_dataset([batch], categorical=["label"])
    assert plain["label"].WhichOneof("stats") == "num_stats"
    assert by_name(declared)["label"].string_stats.unique == 3
    # The schema remembers it.
    again = statistics_of_dataset([batch], schema=infer_schema(declared))
    assert by_name(again)["label"].string_stats.unique == 3


def test_given_options_are_used_and_left_alone() -> None:
    options = tfdv.StatsOptions(num_top_values=1)
    statistics = statistics_of_dataset(table(), categorical=["visits"], options=options)
    assert len(by_name(statistics)["city"].string_stats.top_values) == 1
    assert options.schema is None


def test_no_data() -> None:
    assert StatisticsBuilder().finish().datasets[0].num_examples == 0


def test_finished_statistics_take_nothing_more() -> None:
    builder = StatisticsBuilder()
    builder.add(table(3))
    builder.finish()
    with pytest.raises(RuntimeError, match="finished"):
        builder.add(table(3))
