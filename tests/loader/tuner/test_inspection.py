"""What AUTOTUNE chose is shown, and the slowest stage is named."""

import io
import threading

import pytest
import tensorflow as tf

import keras_het
from keras_het.loader import PipelineReport, inspect
from keras_het.loader.iterators.inspection import read_report

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


def options_of(threads=2):
    """Operations stay as they are written, each a stage; with threads of their own if given."""
    options = tf.data.Options()
    for name in ("map_and_batch_fusion", "map_fusion", "map_parallelization"):
        setattr(options.experimental_optimization, name, False)
    if threads is not None:
        options.threading.private_threadpool_size = threads
    return options


def pipeline():
    numbers = tf.data.Dataset.range(4000).map(lambda value: value + 1, num_parallel_calls=2)
    slow = numbers.map(waiting(0.004), num_parallel_calls=3).batch(4)
    return slow.prefetch(5).with_options(options_of(None))


def read_on(data, batches):
    iterator = iter(data)
    for _ in range(batches):
        next(iterator)
    return iterator


@needs_model
def test_the_slow_stage_is_the_bottleneck():
    text = io.StringIO()
    report = inspect(read_on(pipeline(), 12), file=text)
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
def test_a_dataset_is_read_for_a_while():
    report = inspect(pipeline(), seconds=0.1, file=io.StringIO())
    assert report.batches > 0
    assert report.consumer_seconds is None
    assert report.bottleneck.name == "ParallelMap"


def named(report, name):
    return [stage for stage in report.stages if stage.name == name]


@needs_model
def test_a_stage_before_repeat_has_the_time_of_its_present_round():
    slow = tf.data.Dataset.range(8).map(waiting(0.002)).batch(4)
    iterator = read_on(slow.repeat().prefetch(1).with_options(options_of()), 21)
    for _ in range(20):
        report = read_report(iterator)
        if report.is_complete:  # else it is just between two rounds
            break
        next(iterator)
    (stage,) = named(report, "Map")
    assert stage.elements <= 8
    assert stage.seconds_per_batch >= 4 * 0.002
    assert report.bottleneck is stage


@needs_model
def test_a_short_dataset_is_shown_with_more_than_its_first_batch():
    data = tf.data.Dataset.range(640).batch(64).prefetch(2)
    assert inspect(data, file=io.StringIO()).batches > 1


@needs_model
def test_a_dataset_that_ends_is_shown_with_all_its_stages():
    slow = tf.data.Dataset.range(40).map(waiting(0.002)).batch(4).prefetch(1)
    report = inspect(slow.with_options(options_of()), seconds=60.0, file=io.StringIO())
    assert report.is_complete
    assert report.bottleneck.name == "Map"


@needs_model
def test_what_is_not_tuned_says_so():
    options = tf.data.Options()
    options.autotune.enabled = False
    text = io.StringIO()
    report = inspect(tf.data.Dataset.range(3).with_options(options), file=text)
    assert report.stages == ()
    assert "autotune.enabled" in text.getvalue()


@pytest.mark.parametrize("kind", ["cache", "snapshot"])
@pytest.mark.parametrize("is_built", [True, False])
def test_what_writes_files_is_not_read(is_built, kind, tmp_path):
    def build(knobs):
        numbers = tf.data.Dataset.range(8)
        path = str(tmp_path / "kept")
        return (numbers.cache(path) if kind == "cache" else numbers.snapshot(path)).batch(2)

    data = keras_het.loader.tunable_pipeline(build) if is_built else build(None)
    before = sorted(tmp_path.rglob("*"))
    report = inspect(data, file=io.StringIO())
    assert report.stages == ()
    assert "writes files" in report.verdict
    assert sorted(tmp_path.rglob("*")) == before


@needs_model
def test_before_the_first_batch_nothing_is_known():
    assert "No batch" in read_report(iter(pipeline())).verdict


@pytest.mark.skipif(SHOWS_MODEL, reason="only TensorFlow 2.16 shows no model")
def test_an_old_tensorflow_says_so():
    assert "2.17" in inspect(pipeline(), seconds=0.1, file=io.StringIO()).verdict


def test_other_objects_are_refused(logical_devices):
    strategy = keras_het.HeterogeneousStrategy(list(logical_devices[:2]), share_weights=[1, 1])
    distributed = strategy.distribute(tf.data.Dataset.range(8).batch(2))
    for received in ([1, 2], distributed):
        with pytest.raises(TypeError, match=r"call LoaderTuner.inspect; .* that it was given"):
            inspect(received)


def test_a_report_without_a_buffer_has_no_occupancy():
    assert PipelineReport(()).occupancy is None
    assert PipelineReport(()).bottleneck is None
