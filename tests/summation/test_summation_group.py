"""Workers agree about the place of every sum, whatever else one of them has traced."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import create_logical_devices

from keras_het.exchange.links import LinkSpeed
from keras_het.exchange.secret import credential
from keras_het.strategy.cluster.peer_watch import may_be_a_lost_connection
from keras_het.strategy.hierarchical_all_reduce import suits_summation
from keras_het.summation import Summation
from keras_het.summation import group as group_module
from keras_het.summation.group import SummationGroup
from keras_het.summation.machine import SummationService

PROOF = credential(b"a secret of these tests", "summation")
RUNS = itertools.count(78)
TIMEOUT = 60.0
# Of float32 values: several partitions for each machine.
OPTIONS = Summation(partition_bytes=16, partitions_in_flight=2)


@pytest.fixture(scope="module")
def services():
    create_logical_devices()
    services = [SummationService("127.0.0.1:0", 2, PROOF) for _ in range(3)]
    for service in services:
        service.start()
    yield services
    for service in services:
        service.close()


@pytest.fixture
def groups(services, logical_devices):
    addresses, run = [service.address for service in services], next(RUNS)
    groups = [
        SummationGroup(OPTIONS, services[worker], addresses, 2, worker, PROOF, run)
        for worker in range(2)
    ]
    yield groups
    for group in groups:
        group.abort()


@pytest.fixture
def step(groups):
    """Makes the step of one worker: a sum outside and one inside of a branch."""

    def make(worker):
        group = groups[worker]

        @tf.function
        def step(values, version):
            del version  # another one is traced again
            first = group.sum([values])[0]
            second = tf.cond(values[0] > 0, lambda: group.sum([2.0 * values])[0], lambda: values)
            return first, second

        return step

    return make


def assert_sums(steps, versions):
    values = [np.arange(1, 10, dtype="float32"), np.arange(10, 1, -1, dtype="float32")]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(steps[w], tf.constant(values[w]), versions[w]) for w in range(2)]
        results = [answer.result(TIMEOUT) for answer in both]
    for first, second in results:
        np.testing.assert_array_equal(first, values[0] + values[1])
        np.testing.assert_array_equal(second, 2.0 * (values[0] + values[1]))


def test_a_worker_that_traces_again_needs_no_other_place(groups, step):
    steps = [step(0), step(1)]
    assert_sums(steps, (1, 1))
    places = groups[0].num_partitions
    assert_sums(steps, (2, 1))
    assert groups[0].num_partitions == groups[1].num_partitions == places


@pytest.mark.full
def test_graphs_that_never_run_take_no_place(groups, step):
    class InfersItsShape(keras.layers.Layer):
        def call(self, values):
            assert not suits_summation(values)
            return values

    InfersItsShape()(keras.Input(batch_shape=(23,)))
    assert_sums([step(0), step(1)], (1, 1))


def test_sums_are_made_in_functions_of_float32_values_of_known_shape():
    answers = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def traced(unknown):
        known = tf.ones([3])
        answers.extend(suits_summation(v) for v in (known, unknown, tf.cast(known, tf.float64)))
        tf.cond(unknown[0] > 0, lambda: answers.append(suits_summation(tf.ones([3]))), lambda: None)

    traced.get_concrete_function()
    assert answers == [True, False, False, True]
    assert not suits_summation(tf.ones([3]))


def test_sums_that_wait_take_no_thread_of_tensorflow(groups):
    """Workers that begin their sums in different orders would wait for each other otherwise."""

    @tf.function
    def several(values):
        return [groups[0].sum([values + i])[0] for i in range(12)]

    @tf.function
    def another(values):
        return tf.add_n([tf.linalg.matmul(values + i, values) for i in range(12)])

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(several, tf.ones([5]))
        assert float(pool.submit(another, tf.ones([2, 2])).result(TIMEOUT)[0, 0]) == 156.0
        assert not waiting.done()
        groups[0].abort()
        with pytest.raises(tf.errors.UnknownError):
            waiting.result(TIMEOUT)


def test_a_lost_process_ends_the_step_with_an_error_that_may_be_explained(groups, step):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step(0), tf.ones([9]), 1)
        groups[0].abort()
        with pytest.raises(tf.errors.OpError, match="is lost") as caught:
            waiting.result(TIMEOUT)
    assert may_be_a_lost_connection(caught.value)


def test_workers_that_run_different_steps_are_named(groups, services):
    """Here another one of a cluster of the same secret has contributed in this worker's place."""

    @tf.function
    def total(values):
        return groups[0].sum([values])[0]

    total.get_concrete_function(tf.ones([23]))
    run = services[2].sums._run
    for slot in range(8):
        services[2].sums.contribute(run, slot, 1, 1, np.ones(3, np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="machine 0 refused this step"):
        total(tf.ones([23]))


def test_clearing_tensorflows_caches_does_no_harm(step):
    steps = [step(0), step(1)]
    assert_sums(steps, (1, 1))
    keras.backend.clear_session()
    tf.constant(1.0) + 1.0
    assert_sums(steps, (1, 1))


@pytest.mark.parametrize(
    ("rates", "num_spare", "expected"),
    [
        ([4.0, 4.0, 2.0], 0, [4.0, 4.0, 2.0]),
        ([1.0, 4.0, 4.0], 0, [1.0, 4.0, 4.0]),  # the first one's is slow
        ([4.0, 1.0, 3.0, 8.0], 1, [4.0, 1.0, 3.0, 4.0]),  # nobody shows how fast the fastest is
        ([4.0, 2.0], 0, [2.0, 2.0]),
        ([3.5, 4.0, 4.0, 2.9], 1, [4.0, 4.0, 4.0, 2.9]),  # nearly as fast counts as fast
    ],
)
def test_all_members_find_the_same_rates(monkeypatch, rates, num_spare, expected):
    members, machines = list(range(len(rates) - num_spare)), [str(i) for i in range(len(rates))]
    barrier, rows = threading.Barrier(len(members), timeout=30), {}

    class Link:
        def __init__(self, address, service, proof, worker):
            self.speed = min(rates[int(address)], rates[worker])

        def close(self):
            pass

    monkeypatch.setattr(group_module, "Client", Link)
    monkeypatch.setattr(
        group_module,
        "measure_link",
        lambda probe: LinkSpeed(0.0, probe.args[0].speed),
        raising=True,
    )

    def run(worker):
        def gather(value):
            rows[worker] = value.reshape(1, -1)
            barrier.wait()
            found = np.concatenate([rows[member] for member in members])
            barrier.wait()
            return found

        results[worker] = group_module._measured_rates(machines, members, worker, b"", gather)

    results = {}
    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(members, expected)
