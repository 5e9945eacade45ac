"""A worker's side of the exchange: started again, answered in part, too late, or diverged."""

import numpy as np
import pytest
from service_doubles import SECRET, Service, flat, lose_answer, service_spec

from keras_het.asynchronous.exchange.exchange_engine import VectorExchange
from keras_het.asynchronous.parameter_service import FloatWire, Partitions, Status, TopKWire
from keras_het.asynchronous.parameter_service.client import ServiceLostError
from keras_het.asynchronous.parameter_service.hosting import HostedParts
from keras_het.rules import AsyncEASGD, AsyncSGD, Delta, RoundRobinEASGD

PARTITIONS = Partitions(((3, 4), (5,), ()), partition_bytes=28)  # 18 elements: three of six
ONES = PARTITIONS.cut(np.ones(18, np.float32))
ZEROS = PARTITIONS.cut(np.zeros(18, np.float32))
RAMP = PARTITIONS.cut(np.float32(0.1 * np.arange(1, 19)))


def start(rule=None, **options):
    return Service(PARTITIONS, rule or Delta(), **options)


def join(service, worker=1):
    worker = service.exchange(worker)
    worker.attach()
    return worker


def moved(worker, change):
    if worker._rule.uses_gradients:
        return list(change)
    return [seen + delta for seen, delta in zip(worker.seen, change, strict=True)]


def push(worker, change):
    weights = moved(worker, change)
    worker.send(weights, 8)
    return worker.receive(weights)


def test_a_worker_that_starts_again_is_heard():
    service = start()
    for count in (1, 2, 3):
        worker = join(service)
        push(worker, ONES)
        push(worker, ONES)
        np.testing.assert_allclose(service.center, 2 * count)


def test_a_part_that_answered_keeps_its_answer():
    service = start(AsyncEASGD(alpha=0.5))
    worker, other = join(service, 1), join(service, 2)
    worker.send(ONES, 8)
    lose_answer(worker, 0)
    with pytest.raises(ServiceLostError, match="service at lost"):
        worker.receive(ONES)
    push(other, [10 * part for part in ONES])
    worker.meet_again()
    weights = worker.receive(ONES)
    # parts 1 and 2 met the center at 0, and moved half of the way towards it
    np.testing.assert_allclose(flat(weights[1:]), 0.5)
    assert service.versions == [2] * 3  # nobody counted twice


@pytest.mark.parametrize("fault", ["answer lost", "too stale"])
def test_what_a_small_message_leaves_is_sent_later(fault):
    service = start(wire=TopKWire(0.3), max_staleness=0)
    worker, other = join(service, 1), join(service, 2)
    push(worker, RAMP)
    if fault == "too stale":
        other.attach()
        push(other, ZEROS)
    weights = moved(worker, RAMP)
    pending = worker.send(weights, 8)
    if fault == "answer lost":
        lose_answer(worker)
        with pytest.raises(ServiceLostError):
            worker.receive(weights)
        worker.meet_again()
    expected = Status.STALE if fault == "too stale" else Status.REPEATED
    assert set(pending.answer().statuses) == {expected}
    weights = worker.receive(weights)
    for _ in range(12):
        worker.send(weights, 0)
        weights = worker.receive(weights)
    np.testing.assert_allclose(service.center, 2 * flat(RAMP), rtol=1e-5)


def test_looking_at_the_center_does_not_make_a_change_fresh():
    service = start(max_staleness=1)
    worker, other = join(service, 1), join(service, 2)
    for _ in range(2):
        push(other, ONES)
    assert worker.pull()[0][0] == 2
    np.testing.assert_array_equal(worker.latest_versions, 2)
    pending = worker.send(moved(worker, ONES), 8)
    assert set(pending.answer().statuses) == {Status.STALE}


def test_weights_that_are_not_finite_are_reported(caplog):
    worker = join(start())
    for _ in range(2):
        push(worker, [np.nan * part for part in ONES])
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "not be finite" in caplog.text and "learning rate" in caplog.text


def test_the_group_beside_the_center_can_be_stale_too():
    service = start(AsyncSGD(1.0, staleness_damping=True))
    leader = VectorExchange(service.own_client(), service.rule)
    leader.attach()
    push(leader, ONES)
    worker = join(service)
    for _ in range(4):
        push(worker, ZEROS)
    before = service.center
    push(leader, ONES)
    np.testing.assert_allclose(before - service.center, 1 / 4)
    assert leader.staleness == 4


def test_a_change_that_comes_after_the_end_is_left_where_it_is(caplog):
    service = start()
    worker = join(service)
    push(worker, ONES)
    service.own_client().close_training()
    for _ in range(2):
        weights = moved(worker, ONES)
        np.testing.assert_array_equal(flat(push(worker, ONES)), flat(weights))
    np.testing.assert_array_equal(flat(worker.pull()), 1)  # the final center
    assert service.versions == [1] * 3
    assert caplog.text.count("Training ended before this worker's last change arrived") == 1


def test_a_small_gradient_is_not_rounded_away():
    service = start(AsyncSGD(1e9))
    service.set_center(np.ones(18))
    push(join(service), [np.float32(1e-9) * part for part in ONES])  # 1 - 1e-9 is 1
    np.testing.assert_allclose(service.center, 0.0, atol=1e-6)


def test_the_final_center_has_all_bits():
    service = start(wire=FloatWire("bfloat16"))
    service.set_center(flat(RAMP) / 3)
    worker = join(service)
    np.testing.assert_array_equal(flat(worker.pull(exact=True)), service.center)
    assert (flat(worker.pull()) != service.center).any()


def test_nobody_gets_the_zeros_of_a_service_that_was_restarted():
    """A process of `keras-het parameter-server`, before its leader has brought the center."""
    parts = HostedParts(None, 0, service_spec(shapes=PARTITIONS.shapes), SECRET)
    service = start(awaits_center=True)
    service.parts = parts.parameters.parts
    worker = service.exchange()
    for exact in (False, True):
        with pytest.raises(ServiceLostError, match="was restarted"):
            worker.pull(exact)
    worker.seen = list(ZEROS)
    worker.send(ONES, 8)
    for again in (lambda: worker.receive(ONES), worker.meet_again):
        with pytest.raises(ServiceLostError):
            again()
    assert service.versions == [0] * 3
    worker.transport.restore(RAMP)
    worker.meet_again()
    worker.receive(ONES)
    assert service.versions == [1] * 3
    np.testing.assert_allclose(flat(worker.pull()), flat(RAMP) + 1)


@pytest.mark.parametrize("reason", ["its turn comes", "too stale", "closed"])
def test_a_push_waits_until_it_need_not_wait_any_more(reason):
    bound = 0 if reason == "too stale" else None
    service = start(RoundRobinEASGD(3, alpha=0.5), max_staleness=bound)
    first, worker = join(service, 0), join(service, 1)
    pending = worker.send(ONES, 8)
    assert not pending.has_answer
    if reason == "closed":
        service.own_client().close_training()
    else:
        push(first, ZEROS)
    weights = flat(worker.receive(ONES))
    is_taken = reason == "its turn comes"
    np.testing.assert_allclose(weights, 0.5 if is_taken else 1)
    np.testing.assert_allclose(service.center, 0.5 if is_taken else 0)
    assert service.versions == [{"closed": 0, "too stale": 1}.get(reason, 2)] * 3
    assert worker.has_own_progress == (reason == "too stale")
