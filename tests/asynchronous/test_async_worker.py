"""An async worker's exchanges, with a service in the same process."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from participant_doubles import TRAINS_ALONE, Ledger, Worker, service_of
from service_doubles import lose_answer

from keras_het.asynchronous.exchange.participant import StatisticsAveraging
from keras_het.asynchronous.parameter_service import NO_ANSWER, Answer, Status
from keras_het.asynchronous.parameter_service.client import ServiceLostError
from keras_het.rules import AsyncSGD, Delta, serialize


class SumOfOnes:
    """A mean gradient, at a rate that may not be the first."""

    rate, taken = 1.0, 0

    def take(self):
        self.taken += 1
        return [np.ones(2, np.float32)]

    def check_rate(self, rule):
        if self.rate != 1.0:
            raise ValueError(f"{rule}: Received: {self.rate}")


def start(rule, alpha=0.5, workers=1, bound=None, **options):
    """A service of weights and statistics, and workers; they send gradients if the rule does."""
    service = service_of(rule, alpha, max_staleness=bound)
    made = [Worker(service, client=1 + number, **options) for number in range(workers)]
    for each in made:
        each._mean_gradient = SumOfOnes() if rule.uses_gradients else None
    return service, *made


def test_a_lost_answer_of_the_statistics_does_not_count_that_of_the_weights_twice():
    service, worker, other = start(Delta(), workers=2, **TRAINS_ALONE)
    other.train(10.0)
    other.meet()
    worker.train(1.0)
    lose_answer(worker.engine.exchange, 1)
    worker.train(2.0)  # the weights are answered, the statistics are not
    assert worker.engine.is_lost
    np.testing.assert_array_equal(worker.weights, 3)
    worker.wait_until_answered()
    worker.train()
    worker.meet()
    # of the 2 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(service.center, 12)
    np.testing.assert_array_equal(worker.weights, 12)


def test_without_a_push_under_way_nothing_is_scaled_before_the_center_answers():
    _, worker = start(Delta(), **TRAINS_ALONE)
    connection = worker.engine.exchange.transport
    pull, no_answer = connection.pull, np.array([NO_ANSWER])
    lost = Answer(no_answer, no_answer, [None], [None], loss=ServiceLostError("lost"))
    connection.pull = lambda exact: lost
    worker.vectors.weights.add(4.0)
    for _ in range(3):
        worker._meet(sends=False)
        assert worker.engine.is_lost
        np.testing.assert_array_equal(worker.weights, 4)
    connection.pull = pull
    worker._meet(sends=False)
    np.testing.assert_array_equal(worker.weights, 2)


def test_a_variance_that_falls_while_the_answer_travels_is_not_negative():
    """Of 1 it sent, half goes to a center of 0; when that comes, 0.01 is left."""
    service, worker = start(Delta())
    for value in (1.0, 0.01):
        worker.vectors.state.write([np.full(2, value, np.float32)])
        worker.train(1.0)
    np.testing.assert_allclose(worker.vectors.state.values[0], 0.0)
    np.testing.assert_allclose(service.state_center, 0.5 * 0.5)
    assert serialize(service.state_rule)["class_name"] == "elastic_averaging", (
        "to a service elsewhere"
    )


def test_statistics_keep_what_was_learned_while_the_answer_travelled():
    rule = StatisticsAveraging(0.5)
    sent, own, center = (np.array([value], np.float32) for value in (4.0, 5.0, 3.0))
    np.testing.assert_allclose(rule.receive(own, sent, center), 4.5)
    service, worker = start(Delta(), alpha=1.0)  # of one worker alone
    for _ in range(4):
        worker.vectors.state.add(1.0)
        worker.train(1.0)
    np.testing.assert_array_equal(worker.vectors.state.values[0], 4)
    np.testing.assert_array_equal(service.state_center, 4)


@pytest.mark.quick("True")
@pytest.mark.parametrize("at_its_end", [False, True])
def test_a_change_too_stale_is_sent_until_it_is_taken(at_its_end):
    service, worker, other = start(Delta(), workers=2, bound=0)
    other.train(10.0)
    other.meet()
    worker.vectors.weights.add(1.0)
    worker._samples = 4
    worker._meet(sends=True) if at_its_end else worker.meet()
    np.testing.assert_array_equal(service.center, 11)
    np.testing.assert_array_equal(worker.weights, 11)


def test_gradients_that_were_summed_up_are_sent_at_the_end_only():
    service, worker = start(AsyncSGD(1.0))
    worker._mean_gradient.rate = 0.5  # which does not matter any more
    worker._samples = 4  # of steps since the last exchange
    worker.meet()
    assert not worker._mean_gradient.taken
    for _ in range(2):  # the second time nothing is left
        worker._meet(sends=True)
        assert worker._mean_gradient.taken == 1
        np.testing.assert_array_equal(service.center, -1)
        np.testing.assert_array_equal(worker.weights, -1)


def test_a_worker_that_sends_gradients_only_writes_its_weights():
    """A read copies them from the device, and steps have not changed them."""
    _, worker = start(AsyncSGD(1.0))
    worker.vectors.weights.copies.clear()
    worker.train()
    assert worker.vectors.weights.copies == ["write"]
    np.testing.assert_array_equal(worker.weights, -1)


def test_a_gradient_at_another_rate_is_not_sent():
    service, worker = start(AsyncSGD(1.0))
    worker.train()
    worker._mean_gradient.rate = 0.5
    with pytest.raises(ValueError, match="async_sgd"):
        worker.train()
    np.testing.assert_array_equal(service.center, -1)


def test_a_gradient_too_stale_is_reported_once_and_does_not_count(caplog):
    service, worker, other = start(AsyncSGD(1.0), workers=2, bound=0)
    for _ in range(2):
        other.train()
        worker.train()  # has not seen the other's
    np.testing.assert_array_equal(service.center, -2)
    assert (worker._ledger.used, other._ledger.used) == (0, 8)
    assert caplog.text.count("more updates behind than max_staleness") == 1
    worker.train()
    np.testing.assert_array_equal(service.center, -3)
    assert worker._ledger.used == 4


def test_samples_that_were_reported_before_are_not_taken_back():
    """A claim reports too; the service refuses negative numbers."""
    _, worker, other = start(AsyncSGD(1.0), workers=2, bound=0)
    other.train()
    worker._samples = 4
    worker._meet(sends=True)
    assert worker._unreported == 0 and worker._ledger.used == 0


def test_an_answer_is_taken_after_the_step_in_which_it_comes():
    service, worker, other = start(Delta(), workers=2, period=3)
    for change in (7.0, 2.0, 1.0):
        other.train(change)
    for _ in range(4):
        worker.train(1.0)
    np.testing.assert_array_equal(worker.weights, 10 + 4)
    assert worker.engine.exchange.pending is None
    for _ in range(2):
        worker.train(1.0)
    worker.meet()
    np.testing.assert_array_equal(service.center, 10 + 6)  # each step counts once


def test_an_answer_that_is_not_there_is_not_waited_for():
    service, worker = start(Delta(), period=3)
    for _ in range(3):
        worker.train(1.0)
    pending = worker.engine.exchange.pending
    (answer, _), late = pending.calls, Future()
    pending.calls[0] = late
    for _ in range(2):
        worker.train(1.0)
        assert worker.engine.exchange.pending is pending
    late.set_result(answer.result())
    worker.train(1.0)  # the next exchange waits for it
    assert worker.engine.exchange.pending is not pending
    worker.meet()
    np.testing.assert_array_equal(service.center, 6)


def test_a_lost_answer_that_is_found_before_the_next_exchange():
    service, worker = start(Delta(), period=2, **TRAINS_ALONE)
    for _ in range(2):
        worker.train(1.0)
    lose_answer(worker.engine.exchange)
    worker.train(1.0)
    assert worker.engine.is_lost
    worker.wait_until_answered()
    worker.train(1.0)
    worker.meet()
    # it sent 2; of the 2 that it moved alone, each of two workers keeps a half
    np.testing.assert_array_equal(service.center, 3)


@pytest.mark.parametrize(
    ("rule", "expected"), [(Delta(), ["report", "send"]), (AsyncSGD(1.0), ["send", "report"])]
)
def test_a_report_does_not_wait_behind_weights(rule, expected):
    """A gradient's samples are reported when it is known that it was taken."""
    *_, worker = start(rule)
    order = []

    def noting(name, call):
        return lambda *given: (order.append(name), call(*given))[1]

    exchange, ledger = worker.engine.exchange, worker._ledger
    exchange.send, ledger.report = noting("send", exchange.send), noting("report", ledger.report)
    for _ in range(2):
        worker.train()
    assert order == 2 * expected


def worker_in_epoch_7(num_batches, parts, steps_at_hand, left_over):
    *_, worker = start(Delta(), period=100)
    worker._epoch, worker._latest_batch, worker._num_parts = 7, -1, parts
    worker.num_batches, worker._steps_at_hand = num_batches, steps_at_hand
    worker._claims = SimpleNamespace(left_over=list(left_over), is_exhausted=False)
    assert worker._next_batch() == 0
    return worker, worker._ledger.asked


@pytest.mark.quick("2")
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_next_batch_is_asked_for_while_the_last_part_is_trained_on(parts):
    # it is the last batch, not the end of the pass, that ends it
    worker, asked = worker_in_epoch_7(2, parts, 1 - parts, range(parts - 1))
    left = worker._claims.left_over
    while parts > 1 and len(left) > 1:
        assert not asked
        left.pop()  # the data gives the next part
        worker.train()
    if parts == 2:
        worker.train()
    assert asked[:1] == [7]
    asked.clear()
    assert worker._next_batch() == 1  # the last one of the epoch
    worker.train()
    assert not asked


def test_no_batch_is_asked_for_that_the_pass_does_not_come_to():
    """Keras ends it after 4 steps, of which two batches in parts have as many."""
    worker, asked = worker_in_epoch_7(4, parts=2, steps_at_hand=0, left_over=())
    worker.train()
    assert len(asked) == 1
    assert worker._next_batch() == 1
    worker.train()
    assert len(asked) == 1


def test_a_service_that_is_lost_while_a_batch_is_awaited_leaves_the_worker_alone():
    *_, worker = start(Delta(), **TRAINS_ALONE)
    worker._epoch, worker._latest_batch, worker.num_batches = 1, 3, 6

    class Silent(Ledger):
        def report(self, presence, used):
            raise ServiceLostError("silent")

    worker._ledger = Silent()
    worker._ledger.take = lambda epoch, after: (Status.WAIT, 0, 0)
    assert worker._claim() == 4
    assert worker.engine.is_lost
    worker.engine.watch.stop()
