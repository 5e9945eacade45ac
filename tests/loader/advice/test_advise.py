"""Each weakness is found in a pipeline that has it, and in none that does not."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from advised_pipelines import (
    BATCH,
    SAMPLES,
    centred,
    decoded,
    good,
    good_arrays,
    heavy,
    light,
    many_light,
    randomly,
    slow_in_python,
    write_records,
)

import keras_het
from keras_het.loader import Advice, advise
from keras_het.loader.advice import unshuffled_shards
from keras_het.loader.advice.advice import AdviceReport, size_text
from keras_het.loader.advice.examination import Examination

SECONDS = 0.15
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def work_instead_of_time(monkeypatch):
    """Measures CPU time: what else runs on the machine does not matter then."""
    clock = SimpleNamespace(perf_counter=time.process_time)
    monkeypatch.setattr("keras_het.loader.advice.cost.time", clock)


def report_of(dataset, **arguments) -> tuple[AdviceReport, str]:
    text = io.StringIO()
    report = advise(dataset, seconds=SECONDS, file=text, **arguments)
    return report, text.getvalue()


def found(dataset, kind, **arguments) -> Advice:
    report, text = report_of(dataset, **arguments)
    assert report.kinds.count(kind) == 1, text
    return next(advice for advice in report.advices if advice.kind == kind)


def numbers():
    return tf.data.Dataset.range(SAMPLES)


@pytest.mark.parametrize("pipeline", [good, good_arrays], ids=["samples", "arrays"])
def test_nothing_is_said_about_a_good_pipeline(pipeline):
    report, text = report_of(pipeline())
    assert report.advices == (), text
    assert "Nothing to advise" in text
    assert report.seconds_per_batch > 0


def test_deterministic_work_could_be_cached():
    advice = found(numbers().map(heavy).shuffle(64).batch(BATCH), "cacheable_prefix")
    assert advice.is_measured
    assert advice.estimated_gain > 2
    assert advice.memory_bytes == SAMPLES * 4
    assert "map(heavy)" in advice.stage
    assert "Put cache() after map(heavy)" in advice.message


def test_work_behind_a_shuffle_could_be_moved_before_it_and_cached():
    advice = found(numbers().shuffle(64).repeat(2).map(heavy).batch(BATCH), "cacheable_prefix")
    assert advice.estimated_gain > 2
    assert advice.memory_bytes == SAMPLES * 4
    assert "before shuffle and repeat" in advice.message


def test_samples_that_cannot_be_read_may_be_ignored():
    def decode(number):
        with tf.control_dependencies([tf.debugging.assert_none_equal(number % 7, np.int64(3))]):
            return heavy(number)

    dataset = numbers().filter(lambda number: number >= 0).map(decode).ignore_errors().batch(BATCH)
    advice = found(dataset, "cacheable_prefix")
    assert "map(decode)" in advice.stage
    assert advice.estimated_gain > 2
    with pytest.raises(tf.errors.InvalidArgumentError):
        advise(numbers().map(decode).batch(BATCH), seconds=SECONDS, file=io.StringIO())


def test_only_what_comes_before_random_work_could_be_cached():
    advice = found(numbers().map(heavy).map(randomly).batch(BATCH), "cacheable_prefix")
    assert "map(heavy)" in advice.stage
    assert advice.estimated_gain > 2


class Calls:
    """Counts how often a map is called."""

    def __init__(self):
        self.count = 0

    def __call__(self, value):
        def note(number):
            self.count += 1
            return number

        return tf.ensure_shape(tf.numpy_function(note, [value], value.dtype), value.shape)


def test_a_cache_before_take_is_never_full():
    """Which is why none is advised there."""
    early, late = Calls(), Calls()
    for dataset in (numbers().map(early).cache().take(8), numbers().map(late).take(8).cache()):
        for _ in range(3):
            assert len(list(dataset)) == 8
    assert early.count >= 3 * 8
    assert late.count == 8


@pytest.mark.quick("samples")
@pytest.mark.parametrize(
    ("pipeline", "place"),
    [
        (lambda: numbers().map(heavy).take(64).batch(BATCH), "take"),
        (lambda: numbers().map(heavy).batch(BATCH).take(4).prefetch(1), "take"),
        (lambda: numbers().map(heavy).repeat().take(400).batch(BATCH), "map(heavy)"),
        (lambda: numbers().map(heavy).batch(BATCH).take(100), "map(heavy)"),
    ],
    ids=["samples", "batches", "after repeat", "all of them"],
)
def test_a_cache_comes_after_take(pipeline, place):
    advice = found(pipeline(), "cacheable_prefix")
    assert advice.estimated_gain > 2
    assert f"Put cache() after {place}." in advice.message


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: numbers().shuffle(64).take(64).map(heavy).batch(BATCH),
        lambda: numbers().map(heavy).map(randomly).take(64).batch(BATCH),
        lambda: (
            tf.data.Dataset.zip(numbers().map(heavy), numbers().map(randomly)).batch(BATCH).take(4)
        ),
    ],
    ids=["shuffle", "random", "zip"],
)
def test_where_take_follows_what_changes_there_is_no_place_for_a_cache(pipeline):
    report, text = report_of(pipeline())
    assert "cacheable_prefix" not in report.kinds, text


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: numbers().map(randomly).batch(BATCH),
        lambda: numbers().map(heavy).map(randomly).cache().batch(BATCH),
        lambda: numbers().map(slow_in_python).batch(BATCH),
    ],
    ids=["random", "cached later", "Python"],
)
def test_what_may_change_or_is_cached_needs_no_cache(pipeline):
    report, text = report_of(pipeline())
    assert "cacheable_prefix" not in report.kinds, text


@pytest.mark.full
def test_cheap_work_after_a_cache_is_not_blamed_for_filling_it():
    many = tf.data.Dataset.range(3000).map(heavy).cache().batch(BATCH).map(light)
    report, text = report_of(many)
    assert report.advices == (), text


def test_a_cache_that_takes_long_to_fill_is_left_alone(monkeypatch):
    monkeypatch.setattr("keras_het.loader.advice.examination._FILL_SECONDS", 0.1)
    monkeypatch.setattr("keras_het.loader.advice.examination._FILL_TIMES", 0)
    report, text = report_of(numbers().repeat(20).map(slow_in_python).cache().batch(BATCH))
    assert report.advices == ()
    assert "was not full after" in text


@pytest.mark.full
def test_what_fits_in_no_memory_goes_to_a_file(monkeypatch):
    module = "keras_het.loader.advice.cacheable_prefix"
    monkeypatch.setattr(f"{module}.available_memory", lambda: 0)
    advice = found(numbers().map(heavy).batch(BATCH), "cacheable_prefix")
    assert "too much for the memory" in advice.message
    assert not advice.is_measured


def test_one_of_several_inputs_could_be_cached():
    both = tf.data.Dataset.zip(numbers().map(heavy), numbers().map(randomly))
    advice = found(both.batch(BATCH), "cacheable_prefix")
    assert "map(heavy)" in advice.stage
    assert not advice.is_measured
    assert advice.gain_text.startswith("at most")


def test_a_map_could_work_on_batches():
    shuffled = numbers().shuffle(64).map(many_light).shuffle(64)
    advice = found(shuffled.batch(64).prefetch(1), "vectorisable_map")
    assert advice.is_measured
    assert advice.estimated_gain > 1.5
    assert "map(many_light)" in advice.stage
    assert "map the same function" in advice.message


@pytest.mark.full
def test_a_map_that_mixes_a_sample_could_be_vectorised():
    rows = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal([SAMPLES, 8], [1, 2]))
    advice = found(rows.map(centred).batch(64), "vectorisable_map")
    assert "tf.vectorized_map of" in advice.message
    assert advice.estimated_gain > 1.5


@pytest.mark.quick("random", "batches already")
@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: numbers().batch(64).map(many_light),
        lambda: numbers().map(randomly).batch(64),
        lambda: numbers().map(slow_in_python).batch(64),
        lambda: numbers().map(many_light).padded_batch(64),
    ],
    ids=["batches already", "random", "Python", "padded"],
)
def test_other_maps_stay_where_they_are(pipeline):
    report, text = report_of(pipeline())
    assert "vectorisable_map" not in report.kinds, text


@pytest.mark.quick("True")
@pytest.mark.parametrize("captures", [False, True])
def test_samples_are_decoded_before_they_are_filtered_out(captures):
    allowed = tf.constant([0, 5], tf.int64)

    def is_allowed(image, label):
        return tf.reduce_any(label == allowed) if captures else label == 0

    kept = numbers().shuffle(9).map(decoded).filter(is_allowed)
    advice = found(kept.batch(8), "late_filter")
    assert advice.is_measured
    assert advice.estimated_gain > 2
    assert "drops 80%" in advice.message
    assert "MatMul" in advice.message


@pytest.mark.full
def test_a_filter_that_reads_what_a_map_passes_on_could_come_first():
    pairs = numbers().map(lambda number: (number, number % 5))
    kept = pairs.map(lambda number, label: (heavy(number), label)).filter(lambda _, y: y == 0)
    assert "call filter() before map()" in found(kept.batch(8), "late_filter").message


@pytest.mark.quick("needs the image")
@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: numbers().filter(lambda number: number % 5 == 0).map(decoded).batch(8),
        lambda: numbers().map(decoded).filter(lambda image, label: image >= 150.0).batch(8),
        lambda: numbers().map(decoded).filter(lambda image, label: label >= 0).batch(8),
    ],
    ids=["filtered first", "needs the image", "drops nothing"],
)
def test_other_filters_stay_where_they_are(pipeline):
    report, text = report_of(pipeline())
    assert "late_filter" not in report.kinds, text


def test_the_same_order_of_files_in_each_epoch_is_named(tmp_path):
    names = write_records(tmp_path)
    order = tf.data.Dataset.from_tensor_slices(names)
    for pipeline in (
        order.interleave(tf.data.TFRecordDataset, num_parallel_calls=2),
        order.flat_map(tf.data.TFRecordDataset).shuffle(10),
        tf.data.TFRecordDataset(names, num_parallel_reads=2),
        tf.data.TFRecordDataset(names),
        tf.data.Dataset.list_files(str(tmp_path / "*"), shuffle=False).interleave(
            tf.data.TextLineDataset
        ),
    ):
        (advice,) = unshuffled_shards.find(Examination(pipeline.batch(4), SECONDS, 0.0))
        assert "4 files" in advice.message
        assert advice.gain_text == "order"


def test_the_order_of_files_is_part_of_the_report(tmp_path):
    report, text = report_of(tf.data.TFRecordDataset(write_records(tmp_path)).batch(4))
    assert "unshuffled_shards" in report.kinds
    assert "TFRecordDataset" in text


def test_shuffled_files_are_fine(tmp_path):
    names = write_records(tmp_path)
    order = tf.data.Dataset.from_tensor_slices(names)
    for pipeline in (
        order.shuffle(4).interleave(tf.data.TFRecordDataset, num_parallel_calls=2),
        order.flat_map(tf.data.TFRecordDataset).shuffle(120),
        tf.data.Dataset.list_files(str(tmp_path / "*")).interleave(tf.data.TFRecordDataset),
        tf.data.TFRecordDataset(names[:1]),
    ):
        assert unshuffled_shards.find(Examination(pipeline.batch(4), SECONDS, 0.0)) == []


@pytest.mark.full
def test_a_shuffle_of_many_samples_may_hold_all(tmp_path):
    names = [str(tmp_path / name) for name in ("one", "two")]
    for name in names:
        (tmp_path / name).write_text("sample\n" * 200_000)
    lines = tf.data.TextLineDataset(names)
    for held, kinds in ((400_000, []), (1000, ["unshuffled_shards"])):
        found = unshuffled_shards.find(Examination(lines.shuffle(held).batch(4), SECONDS, 0.0))
        assert [advice.kind for advice in found] == kinds


@pytest.mark.full
def test_a_filter_on_an_endless_source_ends():
    """What stands in for the Python function gives zeros, all of which the filter drops."""
    kept = numbers().repeat().map(slow_in_python).filter(lambda number: number > 0)
    assert "map(slow_in_python)" in found(kept.batch(BATCH), "python_function").stage


def test_a_slow_python_function_is_named():
    advice = found(numbers().map(slow_in_python).map(light).batch(BATCH), "python_function")
    assert "map(slow_in_python)" in advice.stage
    assert advice.estimated_gain > 2
    assert advice.gain_text.startswith("at most")


def test_a_slow_generator_is_named():
    def generate():
        for number in range(SAMPLES):
            sum(range(20_000))
            yield number

    spec = tf.TensorSpec([], tf.int32)
    generated = tf.data.Dataset.from_generator(generate, output_signature=spec)
    assert found(generated.batch(BATCH), "python_function").stage == "from_generator"


def generated(shape, dtype):
    def generate():
        for number in range(SAMPLES):
            sum(range(20_000))
            yield tf.fill(shape, number + 1.0)

    spec = tf.TensorSpec([None] * len(shape), dtype)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


@pytest.mark.quick("crop")
@pytest.mark.parametrize(
    "pipeline",
    [
        # neither gives anything for zeros of the least shape
        lambda: generated([], tf.float32).filter(lambda value: value > 0.0),
        lambda: generated([8], tf.float32).map(lambda row: tf.image.random_crop(row, [4])),
        lambda: generated([8], tf.float32).map(lambda row: tf.reshape(row, [4, 2])),
    ],
    ids=["filter", "crop", "reshape"],
)
def test_a_slow_generator_is_named_whatever_comes_after_it(pipeline):
    advice = found(pipeline().batch(BATCH), "python_function")
    assert advice.stage == "from_generator"
    assert advice.estimated_gain > 2
    assert advice.gain_text.startswith("at most")


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: numbers().map(slow_in_python).cache().batch(BATCH),
        lambda: numbers().take(4).map(slow_in_python).flat_map(light_file).batch(BATCH),
    ],
    ids=["cached", "only names of files"],
)
def test_python_out_of_the_hot_path_is_fine(pipeline):
    report, text = report_of(pipeline())
    assert "python_function" not in report.kinds, text


def light_file(number):
    return tf.data.Dataset.range(100).map(lambda value: value + number)


@pytest.mark.full
def test_what_keeps_up_with_the_device_is_good_enough():
    report, text = report_of(numbers().map(heavy).batch(BATCH), step_seconds=5.0)
    assert report.advices == (), text


def test_what_writes_files_is_only_looked_at(tmp_path):
    dataset = numbers().map(heavy).cache(str(tmp_path / "kept")).batch(BATCH)
    report, text = report_of(dataset)
    assert report.seconds_per_batch is None
    assert "nothing was measured" in text
    assert list(tmp_path.iterdir()) == []


def test_the_pipeline_of_a_builder_is_looked_at():
    def build(knobs):
        return numbers().map(heavy, num_parallel_calls=knobs.num_parallel_calls).batch(BATCH)

    found(keras_het.loader.pipeline(build), "cacheable_prefix")


def test_the_table_shows_everything():
    report, text = report_of(numbers().map(heavy).batch(BATCH))
    shown = " ".join(text.split())
    assert "map(heavy)" in shown
    assert "768 B" in shown
    assert report.advices[0].gain_text in shown
    assert "ms a batch" in shown


def test_sizes_are_readable():
    sizes = [size_text(size) for size in (12, 3456, 7_600_000, 12_300_000_000)]
    assert sizes == ["12 B", "3 kB", "8 MB", "12.3 GB"]


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"what you give to fit"):
        advise([1, 2])


@pytest.mark.parametrize("times", [{"seconds": 0.0}, {"step_seconds": -1.0}])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ValueError, match=r"seconds must be positive.*Received"):
        advise(numbers(), **times)
