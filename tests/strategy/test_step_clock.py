"""The clock counts what a replica computes, not what it waits for."""

import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het.strategy.measure import step_clock
from keras_het.strategy.measure.step_clock import StepClock


@pytest.fixture
def script(monkeypatch, logical_devices):
    """Makes the clock read scripted times, in the order in which it is read."""

    def install(*times):
        left = iter(times)

        def timestamp():
            value = tf.numpy_function(lambda: np.float64(next(left)), [], tf.float64)
            value.set_shape([])
            return value

        monkeypatch.setattr(step_clock.tf, "timestamp", timestamp)

    return install


def test_collectives_inside_the_step_are_taken_out(script):
    script(10.0, 11.0, 15.0, 17.0)

    @tf.function
    def step(x):
        clock = StepClock(x, on_accelerator=False)
        started, (reduced,) = clock.collective_starts([clock.inputs + 1])
        clock.collective_ends(started, [reduced])
        # in this order, so that the scripted times mean what they say
        clock.stop([reduced + tf.cast(clock._waits[0], tf.float32)])
        return clock.seconds

    assert float(step(tf.constant(1.0))) == 3.0  # 7 seconds, of which 4 were waiting


def test_the_last_stop_counts_and_what_comes_after_it_is_distinguished(script):
    script(10.0, 11.0, 14.0, 20.0)

    @tf.function
    def step(x):
        clock = StepClock([x, None], on_accelerator=False)
        y = clock.inputs[0] + 1
        clock.stop([y])
        z = y + tf.cast(clock.seconds, tf.float32)
        clock.stop([z])
        return clock.seconds, clock.seconds_since_stop([z + tf.cast(clock.seconds, tf.float32)])

    assert [float(seconds) for seconds in step(tf.constant(1.0))] == [4.0, 6.0]


def test_an_accelerator_is_waited_for_by_one_value_on_the_host():
    """After all values, of which one may be on the host already."""

    @tf.function
    def step(x):
        clock = StepClock([tf.constant(["text"]), x, tf.shape(x)], on_accelerator=True)
        doubled = clock.inputs[1] * 2
        with tf.device("CPU:0"):
            on_host = tf.constant(1.0, tf.float64) + tf.cast(clock.start_time, tf.float64)
        clock.stop([doubled, tf.shape(doubled), on_host])
        return clock.seconds

    graph = step.get_concrete_function(tf.TensorSpec([3, 2])).graph
    stamps = [op for op in graph.get_operations() if op.type == "Timestamp"]
    assert len(stamps) == 2
    for stamp in stamps:
        (copied,) = [op for op in stamp.control_inputs if op.type == "Identity"]
        assert "CPU:0" in copied.device
        first = copied.inputs[0].op
        assert first.type == "StridedSlice" and first.inputs[0].op.type == "Reshape"
        last = first.inputs[0].op.inputs[0].op
        assert last.inputs[0].dtype == tf.float32
        assert len({last.inputs[0].op, *last.control_inputs}) == 3


def test_each_device_is_waited_for_by_its_own_value():
    @tf.function
    def times(x):
        with tf.device("GPU:0"):
            one = [x + 1, x + 2]
        with tf.device("GPU:1"):
            other = x + 3
        with tf.device("CPU:0"):
            return step_clock.time_when_ready([*one, other, tf.cast(x, tf.float64)], True)

    graph = times.get_concrete_function(tf.TensorSpec([3, 2])).graph
    (stamp,) = [op for op in graph.get_operations() if op.type == "Timestamp"]
    firsts = [op.inputs[0].op for op in stamp.control_inputs if op.type == "Identity"]
    assert sorted(first.device[-5:] for first in firsts) == ["GPU:0", "GPU:1"]
    for first in firsts:
        last = first.inputs[0].op.inputs[0].op
        assert last.device == first.device
        assert len({last.inputs[0].op, *last.control_inputs}) == 4


def test_a_batch_on_the_host_waits_for_the_device_that_it_goes_to():
    @tf.function
    def time_of(x):
        with tf.device("CPU:0"):
            on_host = x + 1
        with tf.device("GPU:0"):
            return step_clock.time_when_ready([on_host], True)

    graph = time_of.get_concrete_function(tf.TensorSpec([3, 2])).graph
    (stamp,) = [op for op in graph.get_operations() if op.type == "Timestamp"]
    (first,) = [op.inputs[0].op for op in stamp.control_inputs if op.type == "Identity"]
    assert first.device.endswith("GPU:0")


def test_what_op_determinism_forbids_is_named(monkeypatch):
    def forbidden():
        raise tf.errors.FailedPreconditionError(None, None, "Timestamp cannot be called")

    monkeypatch.setattr(tf.raw_ops, "Timestamp", forbidden)
    with pytest.raises(RuntimeError, match=r"Received: .*enable_op_determinism.* Leave one"):
        StepClock([tf.ones([2])], on_accelerator=False)


@pytest.mark.parametrize(("on_accelerator", "device"), [(False, DEVICES[1]), (True, "CPU:0")])
def test_the_clock_is_where_no_batch_has_to_wait_for_it(logical_devices, on_accelerator, device):
    """A replica on the second CPU would send its batch to a clock on the first one, and wait."""

    @tf.function
    def step(x):
        with tf.device(logical_devices[1]):
            clock = StepClock([x], on_accelerator)
            started, (reduced,) = clock.collective_starts([clock.inputs[0] * 2])
            clock.collective_ends(started, [reduced])
            clock.stop([reduced])
            return clock.seconds

    graph = step.get_concrete_function(tf.TensorSpec([3, 2])).graph
    of_clock = [op for op in graph.get_operations() if op.type in ("Timestamp", "Sub", "Maximum")]
    assert len(of_clock) == 8
    assert all(device in op.device for op in of_clock)


def test_replicas_of_one_process_run_side_by_side():
    # TensorFlow runs the stateful operations of a function one after the other.
    @tf.function
    def step(x):
        clock = StepClock([x], on_accelerator=False)
        clock.stop([clock.inputs[0] * 2])
        return clock.seconds

    graph = step.get_concrete_function(tf.TensorSpec([3, 2])).graph
    stamps = [op for op in graph.get_operations() if op.type == "Timestamp"]
    assert len(stamps) == 2
    assert not any(other in stamp.control_inputs for stamp in stamps for other in stamps)
