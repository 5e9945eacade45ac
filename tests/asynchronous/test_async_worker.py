"""An async worker's exchanges, with a service in the same process."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from service_doubles import SECONDS, Service, lose_answer

from keras_het.asynchronous.exchange import AsyncWorker
from keras_het.asynchronous.exchange.exchange_engine import ExchangeEngine
from keras_het.asynchronous.exchange.pace import PushPace
from keras_het.asynchronous.exchange.participant import HybridOptions, StatisticsAveraging
from keras_het.asynchronous.parameter_service import NO_ANSWER, Answer, Partitions, Status
from keras_het.asynchronous.parameter_service.channel import ServiceLostError
from keras_het.asynchronous.parameter_service.sample_ledger import Stage
from keras_het.asynchronous.rules import AsyncSGD, Delta, serialize

PARTITIONS = Partitions(((2,),))


class Values:
    def __init__(self):
        self.values = [np.zeros(2, np.float32)]
        self.copies = []

    def read(self):
        self.copies.append("read")
        return list(self.values)

    def write(self, values):
        self.copies.append("write")
        self.values = list(values)

    def add(self, change):
        self.values = [own + change for own in self.values]


class Ledger:
    stage = Stage.RUNNING

    def report(self, presence, used):
        return SimpleNamespace(stage=self.stage, epoch=0)


class Worker(AsyncWorker):
    def __init__(self, service, state_service, client=1, **options):
        self.rule = service.rule
        self.options = HybridOptions(self.rule, **({"period": 1} | options))
        weights, state = Values(), Values()
        self.vectors = SimpleNamespace(weights=weights, state=state, all=[weights, state])
        exchanges = [each.exchange(client) for each in (service, state_service)]
        ask = exchanges[0].transport.greet
        self._engine = ExchangeEngine(exchanges, ask, self.options, "Training", self._note_loss)
        self._ledger, self._plan, self._mean_gradient = Ledger(), None, None
        self._planned_period = self._logs = None
        self._steps = self._samples = self._unreported = self._stage = self._worker = 0
        self.num_participants = 2
        self._claims, self._early_claim = None, Early()
        self._pace = PushPace()
        self._start_from_center()

    def train(self, change):
        self.vectors.weights.add(change)
        self.steps_done(1, 4)

    def wait_until_answered(self):
        assert self._engine.watch._answered.wait(SECONDS)  # the next exchange tries again


def start(rule, alpha=0.5, **options):
    return (
        Service(PARTITIONS, rule, **options),
        Service(PARTITIONS, StatisticsAveraging(alpha)),
    )


GOES_ON = {"goes_on_without_service": True, "timeout_seconds": 0.0}


def start_with_worker_that_goes_on(**options):
    service, state = start(Delta())
    return service, Worker(service, state, **(GOES_ON | options))


def test_a_lost_answer_of_the_statistics_does_not_count_that_of_the_weights_twice():
    service, state = start(Delta())
    worker = Worker(service, state, **GOES_ON)
    other = Worker(service, state, client=2)
    other.train(10.0)
    other.meet_center()
    worker.train(1.0)
    lose_answer(worker._engine.state)
    worker.train(2.0)  # the weights are answered, the statistics are not
    assert worker._engine.is_lost
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 13)
    worker.wait_until_answered()
    worker.train(0.0)
    worker.meet_center()
    # of the 2 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(service.center, 12)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 12)


def test_what_was_learned_alone_is_scaled_once_however_often_rejoining_fails():
    """The ledger answers, and a part of the center does not."""
    service, worker = start_with_worker_that_goes_on()
    connection = worker._engine.weights.transport
    push_again = connection.push_again
    connection.push_again = lambda push, indices: None
    worker.train(1.0)
    lose_answer(worker._engine.weights)
    for count in range(1, 5):
        worker.train(1.0)
        assert worker._engine.is_lost
        np.testing.assert_array_equal(worker.vectors.weights.values[0], 1 + count)
        worker.wait_until_answered()
    connection.push_again = push_again
    worker.train(0.0)
    worker.meet_center()
    # it sent 1; of the 4 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(service.center, 3)


def test_a_service_without_a_leader_is_not_attached_to():
    """One that was restarted has no weights yet."""
    service, worker = start_with_worker_that_goes_on()
    worker.train(1.0)
    lose_answer(worker._engine.weights)
    worker._ledger.stage = Stage.STARTING
    for count in (1, 2):
        worker.train(1.0)
        assert worker._engine.is_lost
        np.testing.assert_array_equal(worker.vectors.weights.values[0], 1 + count)
        worker.wait_until_answered()
    worker._ledger.stage = Stage.RUNNING
    worker.train(0.0)
    assert not worker._engine.is_lost
    worker.meet_center()
    np.testing.assert_array_equal(service.center, 2)


def test_without_a_push_under_way_nothing_is_scaled_before_the_center_answers():
    _, worker = start_with_worker_that_goes_on()
    connection = worker._engine.weights.transport
    pull = connection.pull
    no_answer = np.array([NO_ANSWER])
    lost = Answer(no_answer, no_answer, [None], loss=ServiceLostError("lost"))
    connection.pull = lambda exact: lost
    worker.vectors.weights.add(4.0)
    for _ in range(3):
        worker._meet(sends=False)
        assert worker._engine.is_lost
        np.testing.assert_array_equal(worker.vectors.weights.values[0], 4)
    connection.pull = pull
    worker._meet(sends=False)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 2)


def test_a_variance_that_falls_while_the_answer_travels_is_not_negative():
    """Of 1 it sent, half goes to a center of 0; when that comes, 0.01 is left."""
    service, state = start(Delta())
    worker = Worker(service, state)
    worker.vectors.state.write([np.ones(2, np.float32)])
    worker.train(1.0)
    worker.vectors.state.write([np.full(2, 0.01, np.float32)])
    worker.train(1.0)
    np.testing.assert_allclose(worker.vectors.state.values[0], 0.0)
    np.testing.assert_allclose(state.center, 0.5 * 0.5)
    assert serialize(state.rule)["class_name"] == "elastic_averaging", "to a service elsewhere"


@pytest.mark.quick("True")
@pytest.mark.parametrize("at_its_end", [False, True])
def test_a_change_too_stale_is_sent_until_it_is_taken(at_its_end):
    service, state = start(Delta(), staleness_bound=0)
    worker, other = (Worker(service, state, client) for client in (1, 2))
    other.train(10.0)
    other.meet_center()
    worker.vectors.weights.add(1.0)
    worker._samples = 4
    if at_its_end:
        worker._meet(sends=True)
    else:
        worker.meet_center()
    np.testing.assert_array_equal(service.center, 11)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 11)


def test_gradients_that_were_summed_up_are_sent_at_the_end_only():
    service, state = start(AsyncSGD(1.0))
    worker = Worker(service, state)
    taken = []

    def take():
        taken.append(1)
        return [np.ones(2, np.float32)]

    worker._mean_gradient = SimpleNamespace(take=take)  # the rate does not matter any more
    worker._samples = 4  # of steps since the last exchange
    worker.meet_center()
    assert not taken
    worker._meet(sends=True)
    assert taken == [1]
    np.testing.assert_array_equal(service.center, -1)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], -1)
    worker._meet(sends=True)  # nothing is left
    assert taken == [1]


def test_the_statistics_of_one_worker_alone_go_on():
    service, state = start(Delta(), alpha=1.0)
    worker = Worker(service, state)
    for _ in range(4):
        worker.vectors.state.add(1.0)
        worker.train(1.0)
    np.testing.assert_array_equal(worker.vectors.state.values[0], 4)
    np.testing.assert_array_equal(state.center, 4)


def test_statistics_keep_what_was_learned_while_the_answer_travelled():
    rule = StatisticsAveraging(0.5)
    sent, own, center = (np.array([value], np.float32) for value in (4.0, 5.0, 3.0))
    np.testing.assert_allclose(rule.receive(own, sent, center), 4.5)


class CountingLedger(Ledger):
    used = 0

    def report(self, presence, used):
        self.used += used
        return super().report(presence, used)


class SumOfOnes:
    """A mean gradient, at a rate that may not be the first."""

    rate = 1.0

    def take(self):
        return [np.ones(2, np.float32)]

    def check_rate(self, rule):
        if self.rate != 1.0:
            raise ValueError(f"{rule}: Received: {self.rate}")


def start_with_two_that_send_gradients():
    service, state = start(AsyncSGD(1.0), staleness_bound=0)
    workers = [Worker(service, state, client) for client in (1, 2)]
    for each in workers:
        each._mean_gradient, each._ledger = SumOfOnes(), CountingLedger()
    return service, *workers


def test_a_worker_that_sends_gradients_only_writes_its_weights():
    """A read copies them from the device, and steps have not changed them."""
    _, worker, _ = start_with_two_that_send_gradients()
    weights = worker.vectors.weights
    weights.copies.clear()
    worker.steps_done(1, 4)
    assert weights.copies == ["write"]
    np.testing.assert_array_equal(weights.values[0], -1)


def test_a_gradient_at_another_rate_is_not_sent():
    service, state = start(AsyncSGD(1.0))
    worker = Worker(service, state)
    worker._mean_gradient = SumOfOnes()
    worker.steps_done(1, 4)
    worker._mean_gradient.rate = 0.5
    with pytest.raises(ValueError, match="async_sgd"):
        worker.steps_done(1, 4)
    np.testing.assert_array_equal(service.center, -1)


def test_a_gradient_too_stale_is_told_once_and_does_not_count(caplog):
    service, worker, other = start_with_two_that_send_gradients()
    for _ in range(2):
        other.steps_done(1, 4)
        worker.steps_done(1, 4)  # has not seen the other's
    np.testing.assert_array_equal(service.center, -2)
    assert (worker._ledger.used, other._ledger.used) == (0, 8)
    assert caplog.text.count("more updates behind than staleness_bound") == 1
    worker.steps_done(1, 4)
    np.testing.assert_array_equal(service.center, -3)
    assert worker._ledger.used == 4


def test_samples_that_were_reported_before_are_not_taken_back():
    """A claim reports too; the service refuses negative numbers."""
    _, worker, other = start_with_two_that_send_gradients()
    other.steps_done(1, 4)
    worker._samples = 4
    worker._meet(sends=True)
    assert worker._unreported == 0 and worker._ledger.used == 0


def test_an_answer_is_taken_after_the_step_in_which_it_comes():
    service, state = start(Delta())
    worker, other = (Worker(service, state, client, period=3) for client in (1, 2))
    other.vectors.weights.add(10.0)
    other._samples = 4
    other.meet_center()
    for _ in range(3):
        worker.train(1.0)
    worker.train(1.0)
    np.testing.assert_array_equal(worker.vectors.weights.values[0], 10 + 4)
    assert worker._engine.weights.pending is None and worker._engine.state.pending is None
    for _ in range(2):
        worker.train(1.0)
    worker.meet_center()
    np.testing.assert_array_equal(service.center, 10 + 6)  # each step counts once


def test_an_answer_that_is_not_there_is_not_waited_for():
    service, state = start(Delta())
    worker = Worker(service, state, period=3)
    for _ in range(3):
        worker.train(1.0)
    pending = worker._engine.weights.pending
    (answer,), late = pending.push.calls, Future()
    pending.push.calls[0] = late
    for _ in range(2):
        worker.train(1.0)
        assert worker._engine.weights.pending is pending
    late.set_result(answer.result())
    worker.train(1.0)  # the next exchange waits for it
    assert worker._engine.weights.pending is not pending
    worker.meet_center()
    np.testing.assert_array_equal(service.center, 6)


def test_a_lost_answer_that_is_found_before_the_next_exchange():
    service, worker = start_with_worker_that_goes_on(period=2)
    worker.train(1.0)
    worker.train(1.0)
    lose_answer(worker._engine.weights)
    worker.train(1.0)
    assert worker._engine.is_lost
    worker.wait_until_answered()
    worker.train(1.0)
    worker.meet_center()
    # it sent 2; of the 2 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(service.center, 3)


class NotedOrder(Ledger):
    def __init__(self, order):
        self.order = order

    def report(self, presence, used):
        self.order.append("report")
        return super().report(presence, used)


@pytest.mark.parametrize(
    ("rule", "expected"), [(Delta(), ["report", "send"]), (AsyncSGD(1.0), ["send", "report"])]
)
def test_a_report_does_not_wait_behind_weights(rule, expected):
    """A gradient's samples are reported when it is known that it was taken."""
    service, state = start(rule)
    worker, order = Worker(service, state), []
    worker._ledger, send = NotedOrder(order), worker._engine.weights.send
    worker._mean_gradient = SumOfOnes() if rule.uses_gradients else None

    def noted_send(*arguments):
        order.append("send")
        return send(*arguments)

    worker._engine.weights.send = noted_send
    worker.steps_done(1, 4)
    worker.steps_done(1, 4)
    assert order == 2 * expected


class Early:
    def __init__(self):
        self.asked = []

    def ask(self, epoch):
        self.asked.append(epoch)

    def take(self, epoch, after):
        return Status.OK, after + 1, 1

    def service_lost(self):
        pass


def worker_in_epoch_7(num_batches, parts, steps_at_hand, left_over):
    worker = Worker(*start(Delta()), period=100)
    worker._epoch, worker._latest_batch, worker._num_parts = 7, -1, parts
    worker.num_batches, worker._steps_at_hand = num_batches, steps_at_hand
    worker._claims = SimpleNamespace(left_over=list(left_over), is_exhausted=False)
    assert worker._next_batch() == 0
    return worker


@pytest.mark.quick("2")
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_next_batch_is_asked_for_while_the_last_part_is_trained_on(parts):
    # it is the last batch, not the end of the pass, that ends it
    worker = worker_in_epoch_7(2, parts, 1 - parts, range(parts - 1))
    left = worker._claims.left_over
    while parts > 1 and len(left) > 1:
        assert not worker._early_claim.asked
        left.pop()  # the data gives the next part
        worker.train(0.0)
    if parts == 2:
        worker.train(0.0)
    assert worker._early_claim.asked[:1] == [7]
    worker._early_claim.asked.clear()
    assert worker._next_batch() == 1  # the last one of the epoch
    worker.train(0.0)
    assert not worker._early_claim.asked


def test_no_batch_is_asked_for_that_the_pass_does_not_come_to():
    """Keras ends it after 4 steps, of which two batches in parts have as many."""
    worker = worker_in_epoch_7(4, parts=2, steps_at_hand=0, left_over=())
    worker.train(0.0)
    assert len(worker._early_claim.asked) == 1
    assert worker._next_batch() == 1
    worker.train(0.0)
    assert len(worker._early_claim.asked) == 1


def test_no_step_asks_a_service_that_is_away():
    """A question to a silent one lasts for its whole time-out; a thread asks, after this test."""
    service, worker = start_with_worker_that_goes_on(timeout_seconds=3600.0)
    worker.train(1.0)
    lose_answer(worker._engine.weights)
    worker.train(0.0)
    connection, ledger = worker._engine.weights.transport, worker._ledger
    channels, connection._channels, worker._ledger = connection._channels, None, None
    for _ in range(3):
        worker.train(0.0)
        worker.meet_center()
        assert worker._epoch_of_the_group() == 0
        assert worker._engine.is_lost
    connection._channels, worker._ledger = channels, ledger
    worker._engine.watch._answered.set()
    worker.train(0.0)
    assert not worker._engine.is_lost
    worker.meet_center()
    np.testing.assert_array_equal(service.center, 1)
    worker._engine.watch.stop()


def test_a_service_that_is_lost_while_a_batch_is_awaited_leaves_the_worker_alone():
    _, worker = start_with_worker_that_goes_on()
    worker._epoch, worker._latest_batch, worker.num_batches = 1, 3, 6

    def report(presence, used):
        raise ServiceLostError("silent")

    worker._ledger = SimpleNamespace(report=report)
    worker._early_claim.take = lambda epoch, after: (Status.WAIT, 0, 0)
    assert worker._claim() == 4
    assert worker._engine.is_lost
    worker._engine.watch.stop()
