"""State of rules that is larger than a message comes back as it was, from tasks of their own."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from service_doubles import connect, exchange_with, shared_service, start_service

from keras_het.asynchronous.exchange import HybridOptions
from keras_het.asynchronous.exchange.center import Center
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine
from keras_het.asynchronous.parameter_service import Partitions
from keras_het.asynchronous.parameter_service.part import LARGEST_PIECE
from keras_het.asynchronous.parameter_service.sample_ledger import ServiceLostError
from keras_het.asynchronous.rules import AsyncSGD, DelayCompensated, Delta, RoundRobinEASGD
from keras_het.callbacks import BackupAndRestore
from keras_het.strategy.training_state import TrainingState

LARGE = Partitions(((1_024_000,), (1_024_000,)), 1_024_000, fewest=2)  # as large as a message takes
SMALL = Partitions(((5,),), partition_size=3)


def saved_state(parts):
    found = {}
    for index, (sizes, pieces) in enumerate(parts):
        found[f"part_{index}/sizes"] = np.array(sizes, np.int64)
        for number, piece in enumerate(pieces):
            found[f"part_{index}/{number}"] = np.frombuffer(piece, np.uint8)
    return found


def start(rule, partitions, make=start_service):
    service = make(partitions, rule, num_clients=2)
    return service, connect(service)


def start_small(rule):
    return start(rule, SMALL, shared_service)


@pytest.mark.quick("momentum")
@pytest.mark.parametrize("name", ["momentum", "adam", "delay_compensated"])
def test_large_state_comes_back(logical_devices, name):
    rules = {
        "momentum": lambda: AsyncSGD(0.1, momentum=0.5),
        "adam": lambda: AsyncSGD(optimizer="adam"),
        "delay_compensated": lambda: DelayCompensated(0.1, 1.0, num_workers=2, decay=0.5),
    }
    (first, client), (second, other) = (start(rules[name](), LARGE) for _ in range(2))
    gradients = list(tf.split(tf.random.normal([sum(LARGE.sizes)]), LARGE.sizes))
    versions = np.zeros(2, np.int64)
    for _ in range(2):
        versions = client.push(gradients, versions, 1, gradients).versions
    center = first.center_partitions()
    other.restore(center, client.export())
    for key, value in first.state().items():
        np.testing.assert_array_equal(second.state()[key], value)
    assert second.versions().tolist() == [2, 2]
    for service, pusher in ((first, client), (second, other)):  # and they go on alike
        pusher.push(gradients, versions, 1, gradients)
        service.close()
    for one, two in zip(first.center_partitions(), second.center_partitions(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.full
def test_pieces_that_come_at_the_same_time_are_all_there(logical_devices):
    service, client = start(AsyncSGD(0.1, momentum=0.5), LARGE)
    momentum = np.arange(LARGE.sizes[0], dtype="float32")
    pieces = [momentum[first : first + LARGEST_PIECE] for first in (0, LARGEST_PIECE)]
    texts = [tf.io.serialize_tensor(piece).numpy() for piece in (np.int64([3]), *pieces)]
    states = saved_state([((1, 1_024_000), texts)] * 2)
    for _ in range(10):
        for slots in service.slots():
            slots["momentum"].assign(tf.zeros([1_024_000]))
        client.restore(service.center_partitions(), states)
        for slots in service.slots():
            np.testing.assert_array_equal(slots["momentum"], momentum)
    assert service.versions().tolist() == [3, 3]


@pytest.mark.quick("other0")
@pytest.mark.parametrize(
    "other", [DelayCompensated(0.1, 1.0, num_workers=3), AsyncSGD(0.1), Delta()]
)
def test_state_of_another_rule_or_number_of_workers_is_refused(logical_devices, other):
    _, client = start_small(DelayCompensated(0.1, 1.0, num_workers=2))
    service, receiver = start_small(other)
    before = service.state()
    with pytest.raises(ValueError, match="another rule or number of workers"):
        receiver.restore([tf.ones([size]) for size in SMALL.sizes], client.export())
    for key, value in service.state().items():
        np.testing.assert_array_equal(value, before[key])
    np.testing.assert_array_equal(service.center()[0], np.zeros(5))


@pytest.mark.parametrize(
    ("name", "value"), [("momentum", np.nan), ("momentum", -np.inf), ("version", -5)]
)
def test_state_with_which_no_push_could_be_taken_is_refused(logical_devices, name, value):
    service, client = start_small(AsyncSGD(0.1, momentum=0.5))
    values = np.full(1 if name == "version" else 3, value, "int64" if value == -5 else "float32")
    saved = client.export()
    piece = np.frombuffer(tf.io.serialize_tensor(values).numpy(), np.uint8)
    saved[f"part_0/{int(name == 'momentum')}"] = piece
    with pytest.raises(ValueError, match=r"must be finite, and its versions at least 0.*Remove"):
        client.restore(service.center_partitions(), saved)
    assert all((values == 0).all() for values in service.state().values())


def leader_of(service, goes_on, seconds=10.0):
    """As a leader is whose service other processes hold, as far as backups are concerned."""
    center = object.__new__(Center)
    options = HybridOptions(
        AsyncSGD(0.1), goes_on_without_service=goes_on, timeout_seconds=3600.0
    )  # it asks after the test
    exchange = exchange_with(service, timeout_seconds=seconds)
    center.engine = ExchangeEngine(
        [exchange], lambda: None, options, "The sync group", center._note_loss
    )
    return center


def test_a_backup_without_a_service_keeps_the_state_of_the_one_before(
    logical_devices, tmp_path, monkeypatch
):
    service, client = start(AsyncSGD(0.1, momentum=0.5), SMALL)
    center, backup = leader_of(service, goes_on=True), BackupAndRestore(str(tmp_path))
    strategy = SimpleNamespace(_training_state=TrainingState(center.exported))
    monkeypatch.setattr(backup, "_strategy", lambda: strategy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd")
    before = backup._service_state()
    assert set(before) == {f"service/{name}" for name in client.export()}
    # nobody needs to wait long for one that is gone
    center.engine.weights.transport = connect(service, timeout_seconds=1.0)
    service.close()
    for _ in range(2):  # the second time nobody is asked
        backup._folder.add(model, {"position": np.array("{}"), **before})
        found = backup._service_state()
        assert center.engine.is_lost
        np.testing.assert_equal(found, before)
    center.engine.watch.stop()
    strategy._training_state.export = None  # a training without a service
    assert backup._service_state() == {}


@pytest.mark.full
def test_a_backup_ends_a_training_that_shall_not_go_on_alone(logical_devices):
    service, _ = start(AsyncSGD(0.1, momentum=0.5), SMALL)
    center = leader_of(service, goes_on=False, seconds=1.0)
    service.close()
    with pytest.raises(ServiceLostError, match="did not answer in time"):
        center.exported()
    assert center.engine.is_given_up


@pytest.mark.full
def test_small_state_is_one_piece_a_variable(logical_devices):
    _, client = start_small(RoundRobinEASGD(2))
    saved = client.export()
    for part in ("part_0", "part_1"):
        assert saved[f"{part}/sizes"].tolist() == [1, 2, 1]  # version, left, turn
    assert sorted(saved) == [f"part_{i}/{name}" for i in (0, 1) for name in (0, 1, 2, "sizes")]


@pytest.mark.parametrize("saved", [{"versions": np.zeros(2)}, saved_state([((1,), [b"x"])] * 3)])
def test_saved_state_of_another_number_of_partitions(logical_devices, saved):
    service, client = start_small(Delta())
    with pytest.raises(ValueError, match="expected: 2 partitions"):
        client.restore(service.center_partitions(), saved)
