"""A worker's side of the exchange: started again, answered in part, too late, or diverged."""

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from service_doubles import (
    SECRET,
    client_within,
    connect,
    exchange_with,
    flat,
    lose_answer,
    service_spec,
    shared_service,
)

from keras_het.asynchronous.exchange import exchange_engine
from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.exchange.hosting import HostedParts
from keras_het.asynchronous.exchange.participant import WEIGHTS_PREFIX
from keras_het.asynchronous.parameter_service import (
    NO_ANSWER,
    FloatWire,
    Partitions,
    Status,
    TopKWire,
)
from keras_het.asynchronous.parameter_service.sample_ledger import ServiceLostError
from keras_het.asynchronous.rules import AsyncEASGD, AsyncSGD, Delta, RoundRobinEASGD

PARTITIONS = Partitions(((3, 4), (5,), ()), partition_size=7)  # 18 elements: 7 + 7 + 4
ONES = [np.ones(size, np.float32) for size in PARTITIONS.sizes]
RAMP = [np.float32(0.1 * (1 + np.arange(size))) for size in PARTITIONS.sizes]


RUNNING = []


def start(rule, **options):
    return shared_service(PARTITIONS, rule, **options)


@pytest.fixture(autouse=True)
def end_services():
    yield
    while RUNNING:  # a push that is being answered uses its variables
        RUNNING.pop().close()


def join(service, client=1, rule=None, wire=None):
    worker = exchange_with(service, client, rule, wire=wire)
    worker.adopt(worker.pull())
    return worker


def moved(worker, change):
    if worker._rule.uses_gradients:
        return list(change)
    return [seen + delta for seen, delta in zip(worker.seen, change, strict=True)]


def push(worker, change):
    weights = moved(worker, change)
    worker.send(weights, 8)
    return worker.receive(weights)


def test_a_worker_that_starts_again_is_heard(logical_devices):
    service = start(Delta())
    for count in (1, 2, 3):
        worker = join(service)
        push(worker, ONES)
        push(worker, ONES)
        np.testing.assert_allclose(flat(service.center_partitions()), 2 * count)


def test_a_part_that_answered_keeps_its_answer(logical_devices):
    rule = AsyncEASGD(alpha=0.5)
    service = start(rule)
    worker, other = join(service, 1, rule), join(service, 2, rule)
    worker.send(ONES, 8)
    lose_answer(worker, 0)
    with pytest.raises(ServiceLostError):
        worker.receive(ONES)
    other.send([10 * part for part in ONES], 8)
    other.receive(ONES)
    worker.meet_again()
    weights = worker.receive(ONES)
    # parts 1 and 2 met the center at 0, and moved half of the way towards it
    np.testing.assert_allclose(flat(weights[1:]), 0.5)
    np.testing.assert_array_equal(service.versions(), 2)  # nobody counted twice


@pytest.mark.full
@pytest.mark.parametrize("fault", ["answer lost", "too stale"])
def test_what_a_small_message_leaves_is_sent_later(logical_devices, fault):
    wire = TopKWire(0.3)
    service = start(Delta(), wire=wire, staleness_bound=0)
    worker, other = join(service, 1, wire=wire), join(service, 2, wire=wire)
    push(worker, RAMP)
    if fault == "too stale":
        other.adopt(other.pull())
        push(other, [tf.zeros([size]) for size in PARTITIONS.sizes])
    weights = moved(worker, RAMP)
    pending = worker.send(weights, 8)
    if fault == "answer lost":
        lose_answer(worker)
        with pytest.raises(ServiceLostError):
            worker.receive(weights)
        worker.meet_again()
    statuses = set(pending.push.answer(worker.seen).statuses.numpy())
    assert statuses == {Status.STALE if fault == "too stale" else Status.REPEATED}
    weights = worker.receive(weights)
    for _ in range(12):
        worker.send(weights, 0)
        weights = worker.receive(weights)
    np.testing.assert_allclose(flat(service.center_partitions()), 2 * flat(RAMP), rtol=1e-5)


def test_looking_at_the_center_does_not_make_a_change_fresh(logical_devices):
    service = start(Delta(), staleness_bound=1)
    worker, other = join(service, 1), join(service, 2)
    for _ in range(2):
        push(other, ONES)
    assert worker.pull()[0][0] == 2
    np.testing.assert_array_equal(worker.latest_versions, 2)
    pending = worker.send(moved(worker, ONES), 8)
    assert set(pending.push.answer(worker.seen).statuses.numpy()) == {Status.STALE}


def test_weights_that_are_not_finite_are_told_of(logical_devices, caplog):
    worker = join(start(Delta()))
    for _ in range(2):
        push(worker, [tf.fill([size], np.nan) for size in PARTITIONS.sizes])
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "not finite" in caplog.text and "learning rate" in caplog.text


def test_a_refused_push_is_an_error(logical_devices):
    service = start(Delta())
    worker = join(service)
    stranger = connect(service, 7)
    pending = worker.send(ONES, 8)
    pending.push.wait()
    pending.push = stranger.start_push(ONES, np.zeros(3, np.int64), 8, 1)
    with pytest.raises(PermissionError, match="statuses"):
        worker.receive(ONES)


@pytest.mark.full
def test_the_group_beside_the_center_can_be_stale_too(logical_devices):
    rule = AsyncSGD(1.0, damps_staleness=True)
    service = start(rule, wire=FloatWire())
    leader = VectorExchange(client_within(service), rule)
    leader.adopt(leader.pull())
    push(leader, ONES)
    worker = join(service, 1, rule)
    for _ in range(4):
        push(worker, [tf.zeros([size]) for size in PARTITIONS.sizes])
    before = flat(service.center_partitions())
    push(leader, ONES)
    np.testing.assert_allclose(before - flat(service.center_partitions()), 1 / 4)


def test_a_change_that_comes_after_the_end_is_left_where_it_is(logical_devices, caplog):
    service = start(Delta())
    worker = join(service)
    push(worker, ONES)
    client_within(service).close_training()
    for _ in range(2):
        weights = moved(worker, ONES)
        np.testing.assert_array_equal(flat(push(worker, ONES)), flat(weights))
    np.testing.assert_array_equal(flat(worker.pull()), 1)  # the final center
    np.testing.assert_array_equal(service.versions(), 1)
    assert caplog.text.count("Training ended before this worker's last change came") == 1


@pytest.mark.full
def test_a_small_gradient_is_not_rounded_away(logical_devices):
    rule = AsyncSGD(1e9)
    service = start(rule)
    service.set_partitions([tf.ones([size]) for size in PARTITIONS.sizes])
    worker = join(service, 1, rule)
    tiny = [np.full(size, 1e-9, np.float32) for size in PARTITIONS.sizes]
    push(worker, tiny)  # 1 - 1e-9 is 1
    np.testing.assert_allclose(flat(service.center_partitions()), 0.0, atol=1e-6)


def test_the_final_center_has_all_bits(logical_devices):
    service = start(Delta(), wire=FloatWire("bfloat16"))
    values = [np.float32(1 / 3) * part for part in RAMP]
    service.set_partitions(values)
    worker = join(service, 1, wire=FloatWire("bfloat16"))
    np.testing.assert_array_equal(flat(worker.pull(exact=True)), flat(values))
    assert (flat(worker.pull()) != flat(values)).any()


def serve():
    """A process as `keras-het serve` starts it, before its leader has brought the center."""
    parts = HostedParts(free_address(), 0, service_spec(shapes=PARTITIONS.shapes), SECRET)
    parts.start()
    RUNNING.append(parts)
    return parts


@pytest.mark.full
def test_nobody_gets_the_zeros_of_a_service_that_was_restarted(logical_devices):
    parts = serve()
    worker = exchange_with(parts.weights, 1, prefix=WEIGHTS_PREFIX)
    for exact in (False, True):
        with pytest.raises(ServiceLostError, match="8: restarted"):
            worker.pull(exact)
    worker.seen = [tf.zeros([size]) for size in PARTITIONS.sizes]
    worker.send(ONES, 8)
    for again in (lambda: worker.receive(ONES), worker.meet_again):
        with pytest.raises(ServiceLostError):
            again()
    np.testing.assert_array_equal(parts.weights.versions(), 0)
    worker.transport.restore(RAMP)
    worker.meet_again()
    worker.receive(ONES)
    np.testing.assert_array_equal(parts.weights.versions(), 1)
    np.testing.assert_allclose(flat(worker.pull()), flat(RAMP) + 1)


class Pauses:
    """Stands for the clock: each pause is over at once, and something may happen in it."""

    def __init__(self, events):
        self.events, self.seconds = events, []

    def sleep(self, seconds):
        self.seconds.append(seconds)
        self.events.get(len(self.seconds), lambda: None)()


def wait_for_turn(monkeypatch, worker, events, change=ONES):
    """Finishes a push; the weights, the partitions of each message that was sent, and pauses."""
    pauses, sent = Pauses(events), []
    monkeypatch.setattr(exchange_engine, "time", pauses)
    push_again = worker.transport.push_again

    def note(push, indices):
        sent.append(list(indices))
        push_again(push, indices)

    monkeypatch.setattr(worker.transport, "push_again", note)
    pending = worker.send(change, 8)
    weights = worker.receive(change)
    assert pending.had_to_wait
    return weights, sent, pauses.seconds


def give_turn(service, client, parts=(0, 1, 2)):
    for part in parts:
        service.slots()[part]["turn"].assign(client)


def test_values_are_sent_again_in_their_turn_only(logical_devices, monkeypatch):
    service = start(RoundRobinEASGD(3, alpha=0.5))
    worker = join(service, 1, RoundRobinEASGD(3, alpha=0.5))
    events = {6: lambda: give_turn(service, 1, [0]), 8: lambda: give_turn(service, 1, [1, 2])}
    weights, sent, seconds = wait_for_turn(monkeypatch, worker, events)
    assert sent == [[0], [1, 2]]
    np.testing.assert_allclose(seconds, np.array([2, 4, 8, 16, 16, 16, 2, 4]) / 1000)
    np.testing.assert_array_equal(service.versions(), 1)
    np.testing.assert_allclose(flat(service.center_partitions()), 0.5)
    np.testing.assert_allclose(flat(weights), 0.5)


@pytest.mark.full
@pytest.mark.parametrize("reason", ["closed", "too stale"])
def test_who_need_not_wait_any_more_is_told_at_once(logical_devices, monkeypatch, reason):
    service = start(RoundRobinEASGD(3, alpha=0.5), staleness_bound=0)
    worker = join(service, 2, RoundRobinEASGD(3, alpha=0.5))
    first = join(service, 0, RoundRobinEASGD(3, alpha=0.5))
    happens = {
        "closed": client_within(service).close_training,
        "too stale": lambda: first.send(ONES, 8).push.wait(),
    }[reason]
    _, sent, seconds = wait_for_turn(monkeypatch, worker, {3: happens})
    assert sent == [[0, 1, 2]] and len(seconds) == 3
    assert worker.has_own_progress == (reason == "too stale")
    np.testing.assert_array_equal(service.versions(), int(reason == "too stale"))


def test_a_part_that_is_lost_is_noticed_while_others_say_to_wait(logical_devices, monkeypatch):
    """Whoever has the turn of those may have gone on alone, for the same loss."""
    service = start(RoundRobinEASGD(3, alpha=0.5))
    worker = join(service, 1, RoundRobinEASGD(3, alpha=0.5))
    ask = worker.transport.ask_turns

    def ask_with_last_lost(push, indices):
        return [NO_ANSWER if index == 2 else ask(push, [index])[0] for index in indices]

    monkeypatch.setattr(worker.transport, "ask_turns", ask_with_last_lost)
    worker.send(ONES, 8)
    with pytest.raises(ServiceLostError):
        worker.receive(ONES)
    monkeypatch.undo()
    give_turn(service, 1)
    worker.meet_again()
    np.testing.assert_allclose(flat(worker.receive(ONES)), 0.5)
