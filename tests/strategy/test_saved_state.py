"""State of rules that is larger than a message comes back as it was, from tasks of their own."""

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address

from keras_het.strategy.parameter_service import (
    ParameterClient,
    ParameterService,
    Partitions,
    credential,
)
from keras_het.strategy.parameter_service.saved_state import (
    LARGEST_PIECE,
    PartState,
    from_arrays,
    piece_places,
    to_arrays,
)
from keras_het.strategy.rules import AsyncSGD, DelayCompensated, Delta, RoundRobinEASGD

GOOD = credential(b"0123456789abcdef", "model")
LARGE = Partitions(((1_024_000,), (3,)))  # as large as a message takes, and a small one
SMALL = Partitions(((5,),), partition_size=3)


def start(rule, partitions):
    service = ParameterService(free_address(), partitions, rule, GOOD, 2)
    service.start()
    return service, ParameterClient(service.address, partitions, GOOD, 0)


@pytest.mark.parametrize("name", ["momentum", "adam", "delay_compensated"])
def test_large_state_comes_back(cpu_devices, name):
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


def test_pieces_that_come_at_the_same_time_are_all_there(cpu_devices):
    service, client = start(AsyncSGD(0.1, momentum=0.5), LARGE)
    momentum = np.arange(LARGE.sizes[0], dtype="float32")
    pieces = [momentum[first : first + LARGEST_PIECE] for first in (0, LARGEST_PIECE)]
    texts = [tf.io.serialize_tensor(piece).numpy() for piece in (np.int64([3]), *pieces)]
    small = [tf.io.serialize_tensor(a).numpy() for a in (np.int64([3]), np.float32([4, 5, 6]))]
    states = [PartState((1, 1_024_000), tuple(texts)), PartState((1, 3), tuple(small))]
    for _ in range(10):
        service.slots()[0]["momentum"].assign(tf.zeros([1_024_000]))
        client.restore(service.center_partitions(), states)
        np.testing.assert_array_equal(service.slots()[0]["momentum"], momentum)
    np.testing.assert_array_equal(service.slots()[1]["momentum"], [4, 5, 6])
    assert service.versions().tolist() == [3, 3]


@pytest.mark.parametrize(
    "other", [DelayCompensated(0.1, 1.0, num_workers=3), AsyncSGD(0.1), Delta()]
)
def test_state_of_another_rule_or_number_of_workers_is_refused(cpu_devices, other):
    _, client = start(DelayCompensated(0.1, 1.0, num_workers=2), SMALL)
    service, receiver = start(other, SMALL)
    before = service.state()
    with pytest.raises(ValueError, match="another rule or number of workers"):
        receiver.restore([tf.ones([size]) for size in SMALL.sizes], client.export())
    for key, value in service.state().items():
        np.testing.assert_array_equal(value, before[key])
    np.testing.assert_array_equal(service.center()[0], np.zeros(5))


def test_small_state_is_one_piece_a_variable(cpu_devices):
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
