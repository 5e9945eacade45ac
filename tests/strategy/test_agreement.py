"""Workers that were started differently, or read another order, are told so."""

import random
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het.planning import ReplicaLayout
from keras_het.strategy.cluster import agreement


class Gathering:
    """Stands for the collectives of some workers, each in a thread."""

    def __init__(self, num_workers):
        self._values = [None] * num_workers
        self._all_here = threading.Barrier(num_workers)

    def gather(self, worker, own):
        self._values[worker] = own
        self._all_here.wait(20)
        everyone = np.concatenate(self._values)
        self._all_here.wait(20)
        return everyone


class Worker:
    """Stands for `HeterogeneousExtended` of one worker."""

    def __init__(self, gathering, index, device_type="CPU"):
        self._gathering = gathering
        self._local_device_type = device_type
        self.communication_dtype = None
        self.power_sgd = None
        self.layout = ReplicaLayout((1, 1, 1), index)

    def agree(self, place, described, **options):
        return agreement.agree(self, place, described, **options)

    def meet(self, own):
        return self._gathering.gather(self.layout.worker_index, own)

    gather_over_workers = meet


def told(calls, types=("CPU",) * 3):
    """What all workers are told, "" if nothing; fails unless it is the same."""
    gathering = Gathering(len(calls))
    messages = ["missing"] * len(calls)

    def run(index):
        try:
            calls[index](Worker(gathering, index, types[index]))
            messages[index] = ""
        except ValueError as error:
            messages[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(messages)) == 1, messages
    return messages[0]


def started_with(weights):
    return lambda worker: agreement.check_agreement(worker, weights)


def test_equal_settings_agree():
    assert told([started_with([4, 2, 1]), started_with([4.0, 2.0, 1.0])]) == ""


def test_different_shares():
    equal, other = started_with([4, 2, 1]), started_with([1, 1, 1])
    message = told([equal, other, equal])
    assert message.startswith(
        "The workers were started with different settings: share weights [4.0, 2.0, 1.0] on the "
        "chief and worker 2, [1.0, 1.0, 1.0] on worker 1. Start all workers with the same script"
    )
    assert "type of device" not in message


def test_different_device_types():
    message = told([started_with([1, 1, 1])] * 3, ["CPU", "CPU", "GPU"])
    assert "type of device CPU on the chief and worker 1, GPU on worker 2" in message
    assert 'joins as a summation machine (job "summation")' in message


def test_different_ranks():
    def check(worker):
        index = worker.layout.worker_index
        worker.power_sgd = types.SimpleNamespace(rank=4) if index else None
        agreement.check_agreement(worker, [1, 1, 1])

    message = told([check] * 3)
    assert "powersgd_rank None on the chief, 4 on workers 1 and 2. Start all workers" in message


def does(place, **described):
    return lambda worker: agreement.agree(worker, place, described, opening="They differ")


def test_workers_that_come_to_different_places():
    message = told([does("model.fit", epochs="2"), does("strategy.barrier()"), does("model.fit")])
    assert "model.fit on the chief and worker 2, strategy.barrier() on worker 1" in message


def test_what_only_one_worker_has():
    message = told([does("model.fit"), does("model.fit", layer="Dense"), does("model.fit")])
    assert "They differ: layer none on the chief and worker 2, Dense on worker 1." in message


def test_many_differences_and_long_values_are_cut():
    names = [f"item {number}" for number in range(9)]
    one = does("model.fit", **{name: "a" * 500 for name in names})
    other = does("model.fit", **{name: "a" * 499 + "b" for name in names})
    message = told([one, other])
    assert "; and 4 more." in message
    assert len(message) < 2000
    first, second = message.split("item 0 ")[1].split(";")[0].split(" on the chief, ")
    assert first != second.removesuffix(" on worker 1")


def test_everybody_learns_all_notes():
    notes = [None] * 2

    def note(worker):
        index = worker.layout.worker_index
        notes[index] = agreement.agree(worker, "here", {}, notes=[index + 5, -1])

    assert told([note, note]) == ""
    for everyone in notes:
        np.testing.assert_array_equal(everyone, [[5, -1, 0, 0], [6, -1, 0, 0]])


def creates(value, name="kernel"):
    return lambda worker: agreement.agree_on_values(worker, [[tf.Variable(value)]], name)


def test_variables_of_different_shapes():
    message = told([creates([1.0, 2.0]), creates([1.0]), creates([1.0, 2.0])])
    assert "(kernel): type float32 [2] on the chief and worker 2, float32 [1] on" in message


def test_learning_rates_that_differ_are_no_initial_values():
    message = told([creates(each, "learning_rate") for each in (0.1, 0.5)])
    assert "(learning_rate): value 0.1 on the chief, 0.5 on worker 1" in message
    assert told([creates(0.1, "learning_rate")] * 2) == ""


@pytest.mark.parametrize("values", [[[1.0], [1.0]], [[1.0], [2.0]], [["a"], ["b"]], [3, 3]])
def test_values_of_variables(values):
    created = [tf.Variable(value) for value in values]

    def create(worker):
        agreement.agree_on_values(worker, [[created[worker.layout.worker_index]]], "kernel")

    assert told([create, create]) == ""
    for variable in created:
        np.testing.assert_array_equal(variable.numpy(), created[0].numpy())
        assert variable.numpy().tolist() == tf.constant(values[0]).numpy().tolist()


@pytest.mark.parametrize("differs", [False, True])
def test_new_variables_have_the_chiefs_values(differs):
    copies = [[] for _ in range(3)]

    def create(worker):
        index = worker.layout.worker_index
        of_worker = index if differs else 0
        values = [tf.zeros([3]), tf.constant(5.0 + of_worker), tf.constant([[of_worker, 1]])]
        # some replicas of a worker have copies of their own
        copies[index] = [[tf.Variable(value) for _ in range(1 + index)] for value in values]
        agreement.agree_on_values(worker, copies[index])

    assert told([create] * 3) == ""
    for of_worker in copies:
        for variables, expected in zip(of_worker, [[0, 0, 0], 5, [[0, 1]]], strict=True):
            for variable in variables:
                np.testing.assert_array_equal(variable.numpy(), expected)


def test_new_variables_of_different_shapes():
    def creates(*shapes):
        created = [[tf.Variable(tf.zeros(shape))] for shape in shapes]
        return lambda worker: agreement.agree_on_values(worker, created)

    message = told([creates([2], [3]), creates([2], [4]), creates([2], [3])])
    assert "variable 1 of 2 float32 [3] on the chief and worker 2, float32 [4] on" in message
    message = told([creates([2], [3]), creates([2]), creates([2], [3])])
    assert "variable 0 of 2 float32 [2] on the chief and worker 2, none on worker 1" in message


class Cluster:
    """Stands for `HeterogeneousExtended`: what each of three workers contributes to a gather."""

    def __init__(self, everyone):
        self._everyone = everyone

    def gather_over_workers(self, own):
        return np.concatenate(self._everyone(own))


@pytest.fixture
def seeds(monkeypatch):
    used = []
    monkeypatch.setattr(keras.utils, "set_random_seed", used.append)
    monkeypatch.setattr(agreement, "_drawn_seeds", set())
    return used


def share_seed(monkeypatch, own_is_set, others_are_set):
    monkeypatch.setattr(
        agreement.iterator_adapter, "global_seed", lambda: 5 if own_is_set else None
    )
    first, last = others_are_set
    everyone = [np.array([123, first, 0, 0]), np.array([456, last, 0, 0])]
    agreement.share_random_seed(Cluster(lambda own: [everyone[0], own, everyone[1]]))


def test_without_a_seed_all_take_the_one_of_the_chief(monkeypatch, seeds):
    share_seed(monkeypatch, False, (0, 0))
    assert seeds == [123]


@pytest.mark.parametrize(("own", "others"), [(True, (1, 1)), (False, (0, 1)), (True, (0, 0))])
def test_a_seed_of_the_user_stays(monkeypatch, seeds, own, others):
    share_seed(monkeypatch, own, others)
    assert seeds == []


@pytest.mark.parametrize("which", ["python", "numpy", "none"])
def test_a_generator_that_all_have_seeded_stays(monkeypatch, which):
    monkeypatch.setattr(agreement, "_drawn_seeds", set())
    tf.random.set_seed(None)
    before = random.getstate(), repr(np.random.get_state())

    def answer(own):
        other = own.copy()
        other[2] += which != "python"
        other[3] += which != "numpy"
        return [own, other]

    agreement.share_random_seed(Cluster(answer))
    try:
        assert agreement.drawn_seed() == agreement.iterator_adapter.global_seed() is not None
        assert (random.getstate() == before[0]) == (which == "python")
        assert (repr(np.random.get_state()) == before[1]) == (which == "numpy")
    finally:
        tf.random.set_seed(None)


def test_the_drawn_seed_differs_between_runs(monkeypatch):
    drawn = []
    monkeypatch.setattr(agreement.iterator_adapter, "global_seed", lambda: 5)
    for _ in range(4):
        agreement.share_random_seed(Cluster(lambda own: [drawn.append(int(own[0])) or own] * 3))
    assert len(set(drawn)) > 1
