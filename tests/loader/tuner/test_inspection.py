"""What AUTOTUNE chose is shown, and the slowest stage is named."""

from __future__ import annotations

import io
import threading

import pytest
import tensorflow as tf

from keras_het.loader import PipelineReport, inspect
from keras_het.loader.inspection import read_report

SHOWS_MODEL = hasattr(tf.raw_ops, "IteratorGetModelProto")
needs_model = pytest.mark.skipif(not SHOWS_MODEL, reason="TensorFlow 2.16 shows no model")


def waiting(seconds):
    """A map that waits for emulated storage."""
    storage = threading.Event()

    def call(value):
        storage.wait(seconds)
        return value

    def function(value):
        result = tf.numpy_function(call, [value], tf.int64)
        result.set_shape([])
        return result

    return function


def pipeline():
    numbers = tf.data.Dataset.range(4000)
    numbers = numbers.map(lambda value: value + 1, num_parallel_calls=2)
    slow = numbers.map(waiting(0.004), num_parallel_calls=3).batch(4)
    # without this the slow map and the batch are one stage
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = False
    options.experimental_optimization.map_fusion = False
    return slow.prefetch(5).with_options(options)


@needs_model
def test_the_slow_stage_is_the_bottleneck():
    iterator = iter(pipeline())
    for _ in range(12):
        next(iterator)
    text = io.StringIO()
    report = inspect(iterator, file=text)
    assert report.bottleneck.name == "ParallelMap"
    assert report.bottleneck.parallelism == 3
    assert report.bottleneck.seconds_per_batch >= 4 * 0.004
    assert report.batches == 12
    assert report.algorithm == "DEFAULT"
    names = [stage.name for stage in report.stages]
    assert names[0] == "Prefetch"
    assert names[-1] == "Range"
    assert report.stages[0].buffer_size == 5
    assert 0.0 <= report.occupancy <= 1.0
    assert "it waits for data" in report.verdict
    shown = text.getvalue()
    assert "ParallelMap" in shown
    assert "Bottleneck: ParallelMap" in shown


@needs_model
def test_a_slow_consumer_does_not_wait():
    iterator = iter(tf.data.Dataset.range(50).prefetch(2))
    for _ in range(8):
        next(iterator)
        assert waiting(0.003)(tf.constant(1, tf.int64)) == 1
    assert "the pipeline keeps up" in read_report(iterator).verdict


@needs_model
def test_a_data_set_is_read_for_a_while():
    report = inspect(pipeline(), seconds=0.1, file=io.StringIO())
    assert report.batches > 0
    assert report.consumer_seconds is None
    assert report.bottleneck.name == "ParallelMap"


@needs_model
def test_what_is_not_tuned_says_so():
    options = tf.data.Options()
    options.autotune.enabled = False
    text = io.StringIO()
    report = inspect(tf.data.Dataset.range(3).with_options(options), file=text)
    assert report.stages == ()
    assert "autotune.enabled" in text.getvalue()


@needs_model
def test_before_the_first_batch_nothing_is_known():
    assert "No batch" in read_report(iter(pipeline())).verdict


@pytest.mark.skipif(SHOWS_MODEL, reason="only TensorFlow 2.16 shows no model")
def test_an_old_tensorflow_says_so():
    assert "2.17" in inspect(pipeline(), seconds=0.1, file=io.StringIO()).verdict


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"LoaderTuner.inspect"):
        inspect([1, 2])


def test_a_report_without_a_buffer_has_no_occupancy():
    assert PipelineReport(()).occupancy is None
    assert PipelineReport(()).bottleneck is None
