"""What callbacks see of the center, and when a service ends that only async workers use."""

from types import SimpleNamespace

import numpy as np
import pytest
from participant_doubles import Values, Vectors

from keras_het.asynchronous.exchange import ServiceTask, sync_group
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.parameter_service import FloatWire, TopKWire, credential
from keras_het.asynchronous.parameter_service.sample_ledger import Presence
from keras_het.rules import AsyncEASGD, AsyncSGD, Delta


class Task(ServiceTask):
    """A participant without model and strategy, whose center is 9."""

    def __init__(self, rule, **options):
        self.rule, self.options = rule, HybridOptions(rule, **options)
        self.model = SimpleNamespace(stop_training=False)
        self.vectors = Vectors(Values(1.0))
        self.vectors.fingerprint = lambda rule: f"model {rule.name}"
        self.center, self._own, self._service, self._epoch = None, None, None, 0
        self._came, self._passed_over = set(), set()

    def meet_center(self):
        return Values(9.0).read()


@pytest.mark.parametrize("rule", [Delta(), AsyncEASGD(0.3), AsyncSGD(0.1)])
def test_callbacks_see_the_center_and_training_continues_from_its_own(rule):
    task = Task(rule)
    for _ in range(2):
        task.show_center()
        np.testing.assert_array_equal(task.vectors.weights.values, 9)
    task.hide_center()
    np.testing.assert_array_equal(task.vectors.weights.values, 1)


def test_the_service_shows_the_centers_statistics_too():
    """It takes no step: without them `val_loss` and checkpoints would have those of the start."""
    task = Task(Delta())
    task.vectors = Vectors(Values(1.0), Values(1.0))
    task.center = SimpleNamespace(read=Vectors(Values(9.0), Values(5.0)).read)
    found = ServiceTask.meet_center(task), task.vectors.weights.values, task.vectors.state.values
    np.testing.assert_array_equal(found, [[[9, 9]], [[9, 9]], [[5, 5]]])


class Ledger:
    """One async worker that was silent for some seconds, which pass while the service asks."""

    claimed, is_handed_out = np.array([3]), False

    def __init__(self, silences):
        self.silences, self.asked = list(silences), 0

    def present(self, presence, within_seconds):
        assert presence == Presence.TRAINING
        silence = self.silences[min(self.asked, len(self.silences) - 1)]
        self.asked += 1
        return [0] if silence < within_seconds else []


def serve(monkeypatch, silences):
    ledger = Ledger(silences)
    center = SimpleNamespace(
        ledger=ledger,
        start_epoch=lambda epoch: None,
        # what the others go by: silent for two time-outs
        present=lambda presence: ledger.present(presence, 4.0),
    )
    monkeypatch.setattr(sync_group, "join_service", lambda task, service: center)
    task = Task(Delta(), timeout_seconds=2.0, shutdown_timeout_seconds=60.0)
    task.start_epoch(0)
    assert task.model.stop_training
    return ledger.asked


@pytest.mark.parametrize(
    ("silences", "questions"),
    [([0.0, 30.0, 0.0, 30.0, 61.0], 5), ([0.0, float("inf")], 2)],
    ids=["may come back", "has said its end"],
)
def test_how_long_a_silent_worker_is_waited_for(monkeypatch, silences, questions):
    assert serve(monkeypatch, silences) == questions


def passed_over(training, claimed, waiting=None, answers=None):
    asked, training = [], iter(training)
    waiting, answers = iter(waiting or [[]] * 5), iter(answers or [True] * 5)
    center = SimpleNamespace(
        ledger=SimpleNamespace(claimed=np.array(claimed)),
        present=lambda presence: next(waiting) if presence == Presence.WAITING else present,
        skip=lambda client: asked.append(client) or next(answers),
    )
    task = Task(Delta())
    for present in training:  # noqa: B007
        task._pass_over_the_gone(center)
    return asked


def test_who_is_gone_is_passed_over_until_it_returns():
    # who returns and goes again, once more; 2 has not come yet
    assert passed_over([[0, 1], [0], [0], [0, 1], [0]], claimed=[3, 2, 0]) == [1, 1]
    # until all of the service knows
    assert passed_over([[0]] * 5, claimed=[3, 2], answers=[False] * 2 + [True] * 2) == [1] * 3


def test_who_has_ended_is_waited_for_by_nobody(caplog):
    # 2 took no batch
    given_up = passed_over([[0, 1, 2], [0]], waiting=[[], [1]], claimed=[3, 2, 0, 0])
    assert sorted(given_up) == [1, 2]
    assert "worker 2 is gone" in caplog.text and "worker 1 is gone" not in caplog.text


def proof_of(wire, **options):
    task = Task(Delta(), wire=wire, **options)
    return credential(b"0123456789abcdef", task.service_fingerprint)


def test_tasks_agree_on_the_format_and_the_size_of_messages():
    wires = [FloatWire(dtype) for dtype in ("float32", "float16", "bfloat16")]
    wires += [TopKWire(ratio) for ratio in (0.1, 0.2)]
    assert len({proof_of(wire) for wire in wires}) == len(wires)
    # the largest values of a part have no size: they would land in other places of the center
    small = [proof_of(TopKWire(0.1), partition_bytes=64) for _ in range(2)]
    assert small[0] == small[1] != proof_of(TopKWire(0.1))
