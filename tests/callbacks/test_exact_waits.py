"""The waits that LoaderTuner measures are exact: all time here is that of a clock of ours."""

import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.callbacks import LoaderTuner, loader_tuner
from keras_het.fit import session
from keras_het.loader.input.step_iterator import StepIterator
from keras_het.loader.iterators import live_iterator

ROW, STEP = 0.010, 0.050  # what a row takes to be read, and a step without its data
BATCH, BATCHES = 2, 5


class Clock:
    """Stands still unless somebody says that he worked or waited."""

    def __init__(self):
        self._now = 100.0
        self._lock = threading.Lock()

    def perf_counter(self):
        return self._now

    def advance(self, seconds):
        with self._lock:
            self._now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (loader_tuner, session, live_iterator):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


class Working(keras.layers.Layer):
    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def call(self, inputs):
        def work():
            self._clock.advance(STEP)
            return np.float32(0.0)

        with tf.control_dependencies([tf.numpy_function(work, [], tf.float32)]):
            return tf.identity(inputs)


def model_of(*layers, **options):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False, **options)
    return model


def rows_read_in(read):
    """Batches whose rows are read one after the other, when they are asked for and not before."""

    def load(row):
        row = tf.ensure_shape(tf.numpy_function(read, [row], tf.int64), [])
        return tf.fill([3], tf.cast(row, tf.float32) / 10.0), tf.zeros([1])

    options = tf.data.Options()
    options.autotune.enabled = False
    # TensorFlow would put a buffer behind the batches, which is filled at times of its own
    options.experimental_optimization.apply_default_optimizations = False
    return tf.data.Dataset.range(BATCH * BATCHES).map(load).batch(BATCH).with_options(options)


def measured(kind, model, dataset, callbacks=()):
    """The meter of one epoch of training, evaluation or prediction."""
    tuner, runs = (
        LoaderTuner("fixed", cooperate_with_other_jobs=False),
        (model.fit, model.evaluate, model.predict),
    )
    runs[KINDS.index(kind)](dataset, verbose=0, callbacks=[tuner, *callbacks])
    return (tuner.train_input_wait, tuner.test_input_wait, tuner.predict_input_wait)[
        KINDS.index(kind)
    ]


def per_execution(seconds, steps_per_execution):
    """What executions take whose steps take `seconds`; the last one may have fewer."""
    steps = [min(steps_per_execution, BATCHES - n) for n in range(0, BATCHES, steps_per_execution)]
    return [seconds * count for count in steps]


KINDS = ("train", "test", "predict")


@pytest.mark.quick("train-1-slow", "train-2-slow", "test-1-slow", "predict-1-slow")
@pytest.mark.parametrize("row", [0.0, ROW], ids=["there", "slow"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_data_is_waited_for_as_long_as_it_takes(kind, steps_per_execution, row, clock):
    model = model_of(Working(clock), steps_per_execution=steps_per_execution)
    meter = measured(kind, model, rows_read_in(lambda number: clock.advance(row) or number))
    assert meter.steps == BATCHES
    np.testing.assert_allclose(meter.input_waits, per_execution(BATCH * row, steps_per_execution))
    steps = per_execution(BATCH * row + STEP, steps_per_execution)
    np.testing.assert_allclose(meter.step_times, steps)
    assert meter.idle_fraction == pytest.approx(BATCH * row / (BATCH * row + STEP))


class Host(keras.callbacks.Callback):
    """What follows a step belongs to it in `fit`, and does not elsewhere."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch, logs=None):
        self._clock.advance(STEP)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.quick("train-slow")
@pytest.mark.parametrize(
    ("row", "steps_per_execution"), [(0.0, 1), (ROW, 1), (ROW, 2)], ids=["there", "slow", "two"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_under_the_strategy(
    kind, row, steps_per_execution, clock, logical_devices, monkeypatch
):
    """The data path works ahead at times of its own: what is slow here is to take from it."""
    take = StepIterator.__next__

    def slow(iterator):
        element = take(iterator)
        clock.advance(BATCH * row)
        return element

    monkeypatch.setattr(StepIterator, "__next__", slow)
    with keras_het.HeterogeneousStrategy(list(logical_devices[:2]), share_weights=[1, 1]).scope():
        model = model_of(steps_per_execution=steps_per_execution)
    meter = measured(kind, model, rows_read_in(lambda number: number), [Host(clock)])
    waits = np.array(per_execution(BATCH * row, steps_per_execution))
    assert meter.steps == BATCHES
    np.testing.assert_allclose(meter.input_waits, waits)
    # one call behind each execution, however many steps it had
    np.testing.assert_allclose(meter.step_times, waits + (STEP if kind == "train" else 0.0))


class Saves(keras.callbacks.Callback):
    """What takes long between epochs, as to write a checkpoint; nothing else takes time."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def on_epoch_end(self, epoch, logs=None):
        self._clock.advance(100.0)

    on_test_begin = on_test_end = lambda self, logs=None: self._clock.advance(100.0)


@pytest.mark.quick("others0-True-True")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("others", [[], [Host]])
def test_what_other_callbacks_do_between_epochs_is_no_step(is_first, validates, others, clock):
    tuner = LoaderTuner("fixed", cooperate_with_other_jobs=False)
    callbacks = [Saves(clock), tuner] if is_first else [tuner, Saves(clock)]
    validation = {"validation_data": rows_read_in(lambda row: row)} if validates else {}
    model = model_of(Working(clock))
    callbacks += [other(clock) for other in others]
    data = rows_read_in(lambda row: clock.advance(ROW) or row)
    history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks, **validation).history
    step = BATCH * ROW + STEP + STEP * len(others)
    np.testing.assert_allclose(tuner.train_input_wait.step_times, [step] * (3 * BATCHES))
    np.testing.assert_allclose(history["input_wait_fraction"], [BATCH * ROW / step] * 3)


def strategies(devices):
    return {
        "none": (tf.distribute.get_strategy(), devices[:1]),
        "one device": (tf.distribute.OneDeviceStrategy(devices[1]), devices[1:2]),
        "mirrored": (tf.distribute.MirroredStrategy(list(devices[:2])), devices[:2]),
        # one of them without a share: it waits with the others
        "heterogeneous": (
            keras_het.HeterogeneousStrategy(list(devices[:2]), share_weights=[1, 0]),
            devices[:2],
        ),
    }


WAYS = {
    "fit": ("train", lambda tuner: (tuner.train_input_wait, tuner.replica_waits)),
    "evaluate": ("test", lambda tuner: (tuner.test_input_wait, tuner.test_replica_waits)),
    "predict": ("predict", lambda tuner: (tuner.predict_input_wait, tuner.predict_replica_waits)),
}


@pytest.mark.quick("none-fit", "heterogeneous-fit")
@pytest.mark.quick(*(f"{name}-{way}" for name in ("none", "heterogeneous") for way in WAYS))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["none", "one device", "mirrored", "heterogeneous"])
def test_the_wait_of_a_step_is_that_of_each_replica_of_the_process(name, way, logical_devices):
    """Each way with a callback that saw no other."""
    strategy, devices = strategies(logical_devices)[name]
    with strategy.scope():
        model = model_of()
    tuner = LoaderTuner("fixed", cooperate_with_other_jobs=False)
    getattr(model, way)(rows_read_in(lambda row: row), verbose=0, callbacks=[tuner])
    found = list(tuner.replicas.values())
    assert [tf.DeviceSpec.from_string(each).to_string()[-5:] for each in found] == [
        tf.DeviceSpec.from_string(each).to_string()[-5:] for each in devices
    ]
    kind, results = WAYS[way]
    meter, waits_of_replicas = results(tuner)
    assert len(meter.input_waits) == BATCHES
    assert len(waits_of_replicas) == len(devices)
    for waits in waits_of_replicas.values():
        assert waits.tolist() == meter.input_waits.tolist()
    assert way == "fit" or not any(waits.size for waits in tuner.replica_waits.values())
    report = tuner.to_dict()["replicas"]
    assert [each["device"] for each in report] == found
    assert {each[kind]["input_wait_seconds"] for each in report} == {meter.input_wait_seconds}
