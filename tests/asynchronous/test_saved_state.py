"""State of rules that is larger than a message comes back as it was, from tasks of their own."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address

from keras_het.asynchronous.center.center import Center
from keras_het.asynchronous.center.exchange_engine import ExchangeEngine
from keras_het.asynchronous.center.remote_parts import RemoteParts
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    credential,
)
from keras_het.asynchronous.parameter_service.ledger_connection import ServiceLostError
from keras_het.asynchronous.parameter_service.saved_state import (
    LARGEST_PIECE,
    PartState,
    from_arrays,
    piece_places,
    to_arrays,
)
from keras_het.asynchronous.rules import AsyncSGD, DelayCompensated, Delta, RoundRobinEASGD
from keras_het.callbacks import BackupAndRestore
from keras_het.strategy.training_state import TrainingState

GOOD = credential(b"0123456789abcdef", "model")
LARGE = Partitions(((1_024_000,), (1_024_000,)), 1_024_000, fewest=2)  # as large as a message takes
SMALL = Partitions(((5,),), partition_size=3)


def start(rule, partitions):
    service = ParameterService(free_address(), partitions, rule, GOOD, 2)
    service.start()
    return service, ParameterClient(service.address, partitions, GOOD, 0)


@pytest.mark.quick("adam")
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
    saved = {key: np.array(value) for key, value in to_arrays(client.export()).items()}
    other.restore(center, from_arrays(saved, len(LARGE.sizes)))
    for key, value in first.state().items():
        np.testing.assert_array_equal(second.state()[key], value)
    assert second.versions().tolist() == [2, 2]
    for service, pusher in ((first, client), (second, other)):  # and they go on alike
        pusher.push(gradients, versions, 1, gradients)
        service.close()
    for one, two in zip(first.center_partitions(), second.center_partitions(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_pieces_that_come_at_the_same_time_are_all_there(logical_devices):
    service, client = start(AsyncSGD(0.1, momentum=0.5), LARGE)
    momentum = np.arange(LARGE.sizes[0], dtype="float32")
    pieces = [momentum[first : first + LARGEST_PIECE] for first in (0, LARGEST_PIECE)]
    texts = [tf.io.serialize_tensor(piece).numpy() for piece in (np.int64([3]), *pieces)]
    states = [PartState((1, 1_024_000), tuple(texts))] * 2
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
    _, client = start(DelayCompensated(0.1, 1.0, num_workers=2), SMALL)
    service, receiver = start(other, SMALL)
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
    service, client = start(AsyncSGD(0.1, momentum=0.5), SMALL)
    values = np.full(1 if name == "version" else 3, value, "int64" if value == -5 else "float32")
    first, other = client.export()
    pieces = list(first.pieces)
    pieces[name == "momentum"] = tf.io.serialize_tensor(values).numpy()
    states = [PartState((1, 3), tuple(pieces)), other]
    with pytest.raises(ValueError, match="must be finite, and its versions at least 0"):
        client.restore(service.center_partitions(), states)
    state = service.state()
    state["versions" if name == "version" else "0/momentum"][0] = value
    with pytest.raises(ValueError, match=r"must be finite.*Remove the backup"):
        service.set_state(state)
    assert all((values == 0).all() for values in service.state().values())


def leader_of(client, goes_on):
    """As a leader is whose service other processes hold, as far as backups are concerned."""
    parts = object.__new__(RemoteParts)
    parts.weights, parts.state = client, None
    center = object.__new__(Center)
    options = HybridOptions(
        AsyncSGD(0.1), goes_on_without_service=goes_on, timeout_seconds=3600.0
    )  # it asks after the test
    center._parts = parts
    center.engine = ExchangeEngine(
        None, None, lambda: None, options, "The sync group", center._note_loss
    )
    return center


def test_a_backup_without_a_service_keeps_the_state_of_the_one_before(
    logical_devices, tmp_path, monkeypatch
):
    service, client = start(AsyncSGD(0.1, momentum=0.5), SMALL)
    center, backup = leader_of(client, goes_on=True), BackupAndRestore(str(tmp_path))
    strategy = SimpleNamespace(_training_state=TrainingState(center.exported))
    monkeypatch.setattr(backup, "_strategy", lambda: strategy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd")
    before = backup._service_state()
    assert set(before) == {f"service/{name}" for name in to_arrays(client.export())}
    # nobody needs to wait long for one that is gone
    center._parts.weights = ParameterClient(service.address, SMALL, GOOD, 0, timeout_seconds=1.0)
    service.close()
    for _ in range(2):  # the second time nobody is asked
        backup._folder.add(model, {"position": np.array("{}"), **before})
        found = backup._service_state()
        assert center.engine.is_lost
        np.testing.assert_equal(found, before)
    center.engine.watch.stop()
    strategy._training_state.export = None  # a training without a service
    assert backup._service_state() == {}


def test_a_backup_ends_a_training_that_shall_not_go_on_alone(logical_devices):
    service, _ = start(AsyncSGD(0.1, momentum=0.5), SMALL)
    client = ParameterClient(service.address, SMALL, GOOD, 0, timeout_seconds=1.0)
    center = leader_of(client, goes_on=False)
    service.close()
    with pytest.raises(ServiceLostError, match="did not answer in time"):
        center.exported()
    assert center.engine.is_given_up


def test_small_state_is_one_piece_a_variable(logical_devices):
    _, client = start(RoundRobinEASGD(2), SMALL)
    states = client.export()
    assert [state.sizes for state in states] == [(1, 2, 1)] * 2  # version, left, turn
    assert [len(state.pieces) for state in states] == [3, 3]
    assert piece_places((1, 2 * LARGEST_PIECE + 1)) == [
        (0, 0), (1, 0), (1, LARGEST_PIECE), (1, 2 * LARGEST_PIECE),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [1, 3])
def test_saved_state_of_another_number_of_partitions(number):
    arrays = to_arrays([PartState((1,), (b"x",))] * 2)
    assert from_arrays(arrays, 2) == [PartState((1,), (b"x",))] * 2
    for saved in (arrays, {"versions": np.zeros(2)}):
        with pytest.raises(ValueError, match=f"expected: {number} partitions"):
            from_arrays(saved, number)
