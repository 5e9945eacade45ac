"""The service and its clients, over a real connection and within the process."""

import itertools
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from addresses import free_address, silent_address
from service_doubles import PROOF, SECONDS, SECRET, Clock, Service, flat, serving

from keras_het.asynchronous.parameter_service import (
    NO_ANSWER,
    FloatWire,
    ParameterClient,
    ParameterService,
    Partitions,
    Status,
    TopKWire,
    credential,
)
from keras_het.asynchronous.parameter_service import client as client_module
from keras_het.asynchronous.parameter_service.client import (
    SERVICE,
    UNDER_WAY,
    RemoteChannel,
    ServiceLostError,
    UnknownTrainingError,
)
from keras_het.asynchronous.parameter_service.part import Push
from keras_het.asynchronous.parameter_service.wire import spread_partitions
from keras_het.exchange.client import Client
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.server import Server
from keras_het.rules import (
    AsyncEASGD,
    AsyncSGD,
    DelayCompensated,
    Delta,
    ElasticAveraging,
    RoundRobinEASGD,
)

PARTITIONS = Partitions(((3, 4), (5,), ()), partition_bytes=28)  # 18 elements: three of six
MANY = Partitions(((20,),), partition_bytes=8)
ZERO = [0] * 3


def ramp(scale=1.0, partitions=PARTITIONS):
    return partitions.cut(np.float32(scale) * np.arange(partitions.size, dtype=np.float32))


def start(rule=None, **options):
    service = Service(PARTITIONS, rule or Delta(), num_workers=4, **options)
    service.set_center(np.ones(18))
    return service


def push(client, changes, versions=ZERO, number=0, samples=8):
    return client.start_push(changes, versions, samples, number).answer()


def shares(rule, num_services, awaits_center=False, **options):
    places = spread_partitions(PARTITIONS.sizes, num_services)
    for place in range(num_services):
        indices = [index for index, own in enumerate(places) if own == place]
        yield Service(
            PARTITIONS,
            rule(),
            held=indices,
            awaits_center=awaits_center,
            num_workers=4,
            **options,
        )


@pytest.mark.parametrize("way", ["network", "three services", "process", "own"])
def test_the_same_numbers_on_every_way(way):
    services = list(shares(lambda: ElasticAveraging(0.3), 3 if way == "three services" else 1))
    with serving(*services) as (connect, _):
        within = {"process": services[0].client, "own": services[0].own_client}
        client = within.get(way, connect)()
        client.greet()
        client.restore(np.ones([3, 6], np.float32))
        center, versions = np.ones(18, np.float32), ZERO
        for scale in (1.0, 3.0):
            answer = push(client, ramp(scale), versions)
            np.testing.assert_array_equal(flat(answer.values), center)
            center = center + np.float32(0.3) * (flat(ramp(scale)) - center)
            np.testing.assert_allclose(flat(client.pull().values), center, rtol=1e-6)
            center, versions = flat(client.pull().values), answer.versions
        assert versions.tolist() == [2] * 3
        assert sorted(itertools.chain(*(service.versions for service in services))) == [2] * 3
        assert client.latest_number() == 0
        push(client, ramp(), number=7)
        assert client.latest_number() == 7
        assert client.leave(1)
        client.close_training()
        assert set(push(client, ramp()).statuses) == {Status.CLOSED}
        np.testing.assert_allclose(client.export()["part_2/version"], 3)


@pytest.mark.parametrize("wire", [FloatWire("float16"), TopKWire(0.3)], ids=["16 bits", "top"])
def test_the_leader_beside_the_center_is_not_rounded_and_never_too_stale(wire):
    service = start(wire=wire, max_staleness=0)
    own, change = service.own_client(), [part / np.float32(3) for part in ramp()]
    push(service.client(1), ramp())
    before = service.center
    answer = push(own, change)
    assert set(answer.statuses) == {Status.OK}
    np.testing.assert_array_equal(flat(answer.values), before + flat(change))
    np.testing.assert_array_equal(flat(own.pull().values), flat(answer.values))
    good = ramp()
    answer = push(own, [good[0], np.inf * good[1], good[2]])  # one bad part keeps no other
    assert answer.statuses.tolist() == [Status.OK, Status.NOT_FINITE, Status.OK]
    assert service.versions == [3, 2, 3] and answer.values[1] is None


@pytest.mark.parametrize("proof", [b"", PROOF[:-1], credential(SECRET, "another model")])
def test_a_wrong_credential_is_refused(proof):
    service = start()
    with serving(service) as (connect, _):
        stranger = connect(proof=proof)
        for ask in (stranger.greet, stranger.pull, lambda: push(stranger, ramp()), stranger.export):
            with pytest.raises(PermissionError, match="shared secret, model") as caught:
                ask()
            assert str(caught.value).count("refused this worker") == 1
        assert set(push(connect(), ramp()).statuses) == {Status.OK}
    assert service.versions == [1] * 3


def test_a_service_with_too_many_connections_is_lost_for_now():
    server = Server("127.0.0.1:0", most_connections=1)
    server.serve(SERVICE, PROOF, start().handle)
    server.start()
    first, second = (RemoteChannel(server.address, PROOF, worker, SECONDS) for worker in (0, 1))
    first.ask(Message(Kind.LATEST))
    with pytest.raises(ServiceLostError, match="oncurrent RPC limit"):
        second.ask(Message(Kind.LATEST))
    for each in (first, second, server):
        each.close()


def test_a_worker_that_is_not_known_is_refused():
    with serving(start()) as (connect, _):
        with pytest.raises(PermissionError, match=r"number differs.*4; expected: one of 4"):
            connect(4).greet()
        connect(3).greet()


def test_a_training_that_is_not_known():
    service = start()
    with serving(service) as (connect, (server,)):
        client, other = connect(), connect(proof=b"of the next training", seconds=0.5)
        client.greet()
        server.end(SERVICE)
        with pytest.raises(ServiceLostError, match="ending"):
            other.greet()
        server.withdraw(SERVICE)
        for _ in range(2):  # the first time the connection broke, the second it is refused
            assert set(push(client, ramp()).statuses) == {NO_ANSWER}
        with pytest.raises(UnknownTrainingError, match=r"There is no service.*on_service_loss"):
            client.greet()
        assert not client.leave(0)
        for ask in (client.export, client.latest_number, client.close_training):
            with pytest.raises(UnknownTrainingError):
                ask()
        server.serve(SERVICE, PROOF, service.handle)
        assert set(push(client, ramp()).statuses) == {Status.OK}


@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float32"])
def test_half_precision(wire):
    service = start(wire=FloatWire(wire))
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}[wire]
    changes = [part / np.float32(3) for part in ramp()]
    with serving(service) as (connect, _):
        client = connect()
        pending = client.start_push(changes, ZERO, 8)
        answer = pending.answer()
        left = 0 * flat(changes) if wire == "float32" else flat(pending.residuals)
        assert set(answer.statuses) == {Status.OK}
        np.testing.assert_array_equal(service.center, 1 + (flat(changes) - left))
        np.testing.assert_allclose(flat(answer.values), service.center, rtol=step)
        np.testing.assert_array_equal(flat(client.pull().values), flat(answer.values))
        np.testing.assert_array_equal(flat(client.pull(is_exact=True).values), service.center)
        assert pending.requests[0].vectors[0].itemsize == (4 if wire == "float32" else 2)
    assert (np.abs(left) <= step * np.abs(flat(changes)) + 1e-9).all()
    assert bool(np.abs(left).max() > 0) == (wire != "float32")
    if wire == "float16":  # what it cannot hold is refused, and is no longer a number
        assert set(push(service.client(), [part * 1e5 for part in changes]).statuses) == {
            Status.NOT_FINITE
        }


def test_error_feedback_loses_nothing():
    """NumPy's reference: what is not sent is kept and added to the next change."""
    service, random = start(wire=TopKWire(0.3)), np.random.default_rng(0)
    kept, center, total = np.zeros([3, 6]), np.ones([3, 6]), np.zeros(18)
    residuals = [np.zeros(6, np.float32)] * 3
    with serving(service) as (connect, _):
        client = connect()
        for _ in range(20):
            change = random.normal(size=[3, 6]).astype("float32")
            total += flat(change)
            pending = client.start_push(list(change + residuals), ZERO, 8)
            answer, residuals = pending.answer(), pending.residuals
            kept += change
            for own, part in zip(kept, center, strict=True):
                largest = np.argsort(-np.abs(own))[:2]
                part[largest] += own[largest]
                own[largest] = 0
            np.testing.assert_allclose(flat(answer.values), flat(center), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(flat(residuals), flat(kept), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(flat(center) - 1 + flat(kept), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wire", "setting", "match"),
    [(FloatWire, "int8", "float16"), (TopKWire, 0, "above 0"), (TopKWire, 1.5, "at most 1")],
)
def test_wrong_wires(wire, setting, match):
    with pytest.raises(ValueError, match=match):
        wire(setting)


@pytest.mark.parametrize(
    "rule",
    [DelayCompensated(0.1, 1.0, num_workers=3), RoundRobinEASGD(3), AsyncEASGD(None, None, 3)],
)
def test_a_rule_that_was_made_for_fewer_workers_is_refused(rule):
    ParameterService(3).hold(PARTITIONS, rule)
    with pytest.raises(ValueError, match=r"made for 3 workers.*num_workers=4"):
        ParameterService(4).hold(PARTITIONS, rule)


class Answers:
    """A channel whose answers come when they are told to, or at once."""

    address, timeout_seconds, most_under_way = "there", 0.05, UNDER_WAY

    def __init__(self, handle, is_immediate=False):
        self.handle, self.is_immediate = handle, is_immediate
        self.under_way, self.most, self.count = [], 0, 0

    def start(self, request):
        answer = Future()
        self.under_way.append((request, answer))
        self.most, self.count = max(self.most, len(self.under_way)), self.count + 1
        if self.is_immediate:
            self.answer(-1)
        return answer

    def answer(self, place=0, error=None):
        request, answer = self.under_way.pop(place)
        answer.set_exception(error) if error else answer.set_result(self.handle(0, request))


def test_few_messages_are_under_way_to_each_service():
    service = Service(MANY, Delta())
    channels = [Answers(service.handle), Answers(service.handle)]
    client = ParameterClient(channels, MANY)
    pending = client.start_push(ramp(1, MANY), [0] * 10, 1)
    assert not pending.has_answer
    for left in range(5, 0, -1):
        for channel in channels:
            assert len(channel.under_way) == min(UNDER_WAY, left) and not pending.has_answer
            channel.answer(-1)
    assert pending.has_answer and [each.most for each in channels] == [UNDER_WAY] * 2
    assert set(pending.answer().statuses) == {Status.OK}
    np.testing.assert_array_equal(service.center, flat(ramp(1, MANY)))


def test_answers_that_come_from_other_threads():
    service = Service(MANY, Delta())
    with serving(service) as (connect, _):
        clients = [connect(worker) for worker in range(3)]
        pushes = [client.start_push(ramp(1, MANY), [0] * 10, 1, 1) for client in clients]
        for pending in pushes:
            assert set(pending.answer().statuses) == {Status.OK}
    np.testing.assert_array_equal(service.center, 3 * flat(ramp(1, MANY)))


@pytest.mark.parametrize("is_broken", [False, True], ids=["silent", "broken"])
def test_a_lost_service_is_waited_for_once(monkeypatch, is_broken):
    waits, result_of = [], client_module.result_of
    monkeypatch.setattr(
        client_module,
        "result_of",
        lambda call, *of: (call.done() or waits.append(of[0]), result_of(call, *of))[1],
    )
    service = Service(MANY, Delta())
    there, gone = Answers(service.handle, is_immediate=True), Answers(service.handle)
    client = ParameterClient([there, gone], MANY)
    pending = client.start_push(ramp(1, MANY), [0] * 10, 1, 1)
    gone.answer(error=ConnectionError("gone") if is_broken else None)
    answer = pending.answer()
    unanswered = [*range(1, 10, 2)][0 if is_broken else 1 :]
    assert np.flatnonzero(answer.statuses == NO_ANSWER).tolist() == unanswered
    assert {answer.versions[place] for place in unanswered} == {-1}
    assert [place for place, value in enumerate(answer.values) if value is None] == unanswered
    assert (waits, gone.count) == (([], UNDER_WAY) if is_broken else ([gone], UNDER_WAY + 1))
    gone.is_immediate = True
    client.push_again(pending, unanswered)
    assert set(pending.answer().statuses) == {Status.OK}
    assert set(service.versions) == {1}


def test_processes_that_are_silent_cost_one_time_out_together(monkeypatch):
    clock = Clock()

    def wait(call, channel, seconds):
        clock.sleep(seconds)
        raise ServiceLostError("silent")

    monkeypatch.setattr(client_module, "time", clock)
    monkeypatch.setattr(client_module, "result_of", wait)
    silent = [Answers(None) for _ in range(3)]
    assert set(ParameterClient(silent, MANY).pull().statuses) == {NO_ANSWER}
    assert clock.now == pytest.approx(Answers.timeout_seconds)


def test_processes_that_are_gone_are_reached_for_at_once(monkeypatch):
    """No connection waits for another."""
    reached = threading.Barrier(4)  # those that connect, and this test
    monkeypatch.setattr(Client, "connect", lambda self, seconds: reached.wait(SECONDS) and None)
    channels = [RemoteChannel(free_address(), PROOF, 0, SECONDS) for _ in range(3)]
    calls = [channel.start(Message(Kind.LATEST)) for channel in channels]
    reached.wait(SECONDS)
    for call, channel in zip(calls, channels, strict=True):
        with pytest.raises(ConnectionError, match="no connection"):
            call.result(SECONDS)
        channel.close()


@pytest.mark.parametrize("kind", ["nobody", "silent", "closed", "keeps answers"])
def test_a_process_that_does_not_answer(kind):
    service = start()
    handlers = [lambda sender, request: Future()] if kind == "keeps answers" else [service.handle]
    with silent_address() as silent, serving(service, handlers=handlers) as (connect, (server,)):
        client = connect(seconds=0.3)
        if kind in ("nobody", "silent"):
            address = silent if kind == "silent" else free_address()
            client = ParameterClient([RemoteChannel(address, PROOF, 0, 0.3)], PARTITIONS)
        if kind == "closed":
            client.greet()
            server.close()
        assert set(push(client, ramp(), number=1).statuses) == {NO_ANSWER}
        assert set(client.pull().statuses) == {NO_ANSWER}
        with pytest.raises(
            ServiceLostError, match=r"did not answer within 0\.3 s.*on_service_loss"
        ):
            client.greet()
        for channel in client._channels:
            channel.close()
    assert service.versions == ZERO


class NoMemory(FloatWire):
    def encode_answer(self, values):
        raise MemoryError("none left")


def test_a_push_that_waited_has_an_answer_also_if_it_cannot_be_sent():
    service = start(RoundRobinEASGD(4, 0.5), wire=NoMemory())
    waits, taken = (service.client(worker).start_push(ramp(), ZERO, 8, 1) for worker in (1, 0))
    for push in (taken, waits):
        with pytest.raises(MemoryError, match="none left"):
            push.calls[0].result(0)


def test_a_turn_is_waited_for_however_long_as_long_as_the_service_is_there():
    service = Service(PARTITIONS, RoundRobinEASGD(3, 0.5))
    with serving(service) as (connect, (server,)):
        first, second = (connect(number, seconds=1.0, may_wait=True) for number in range(2))
        asked, ask = [], second._channels[0].ask

        def ask_and_go_on(request):
            asked.append(request.kind)
            if len(asked) == 3:
                assert set(push(first, ramp(), number=1).statuses) == {Status.OK}
            return ask(request)

        second._channels[0].ask = ask_and_go_on
        answer = push(second, ramp(), number=1)
        assert set(answer.statuses) == {Status.OK}
        assert len(asked) >= 3 and set(asked) == {Kind.LATEST}
        np.testing.assert_allclose(flat(answer.values), 0.5 * flat(ramp()))
        assert set(push(second, ramp(), number=1).statuses) == {Status.REPEATED}
        pending = first.start_push(ramp(), ZERO, 1, 2)
        assert not pending.has_answer  # it is the third's turn
        server.close()
        assert set(pending.answer().statuses) == {NO_ANSWER}
    assert service.versions == [2] * 3


def test_a_lost_part_is_noticed_while_another_waits_for_its_turn():
    """Whose turn it is may have gone on alone, for the same loss."""
    services = list(shares(lambda: RoundRobinEASGD(4, 0.5), 2))
    with serving(*services) as (connect, (_, server)):
        second = connect(1, seconds=1.0, may_wait=True)
        asked, ask = itertools.count(), second._channels[0].ask
        second._channels[0].ask = lambda request: ask(request) if next(asked) < 9 else 1 / 0
        pending = second.start_push(ramp(), ZERO, 1, 1)
        server.close()
        assert set(pending.answer().statuses) == {NO_ANSWER}
        first = connect(0, seconds=1.0, may_wait=True)
        answers = [push(first, ramp(), number=1), pending.answer()]
        for answer in answers:
            assert sorted(answer.statuses) == [NO_ANSWER, Status.OK, Status.OK]


def test_state_comes_back_to_other_services():
    first = list(shares(lambda: AsyncSGD(0.1, momentum=0.5), 2))
    second = list(shares(lambda: AsyncSGD(0.1, momentum=0.5), 2, awaits_center=True))
    with serving(*first) as (connect, _), serving(*second) as (connect_to_second, _):
        client, other = connect(), connect_to_second()
        for _ in range(2):
            push(client, ramp())
        saved = client.export()
        assert sorted(saved) == sorted(
            f"part_{i}/{n}" for i in range(3) for n in ("momentum", "version")
        )
        assert set(other.pull().statuses) == {Status.NO_CENTER}
        other.restore(client.pull().values, saved)
        np.testing.assert_equal(other.export(), saved)
        answers = [push(each, ramp(), [2] * 3) for each in (client, other)]
        np.testing.assert_array_equal(flat(answers[0].values), flat(answers[1].values))
        assert answers[1].versions.tolist() == [3] * 3


BROKEN = {
    "no state": ({"versions": np.zeros(2)}, "expected: 3 partitions"),
    "a part less": ({"part_0/version": np.int64(1)}, "expected: 3 partitions"),
    "negative": (
        {f"part_{i}/version": np.asarray(-i, np.int64) for i in range(3)},
        r"must be finite, and its versions at least 0.*Remove",
    ),
    "another rule": (
        {f"part_{i}/{n}": np.zeros(1) for i in range(3) for n in "ab"},
        r"another rule, size or number of workers.*Remove the backup",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_saved_state_that_does_not_fit_is_refused(name):
    saved, match = BROKEN[name]
    service = start()
    with serving(service) as (connect, _), pytest.raises(ValueError, match=match):
        connect().restore(ramp(2), saved)
    np.testing.assert_array_equal(service.center, 1)


def test_a_worker_that_comes_back_between_the_parts_of_a_push_holds_up_nobody_for_good():
    service = Service(MANY, RoundRobinEASGD(2, 0.5), num_workers=2)
    parts = [service.parts[number] for number in sorted(service.parts)]
    zeros, versions = MANY.cut(np.zeros(MANY.size, np.float32)), [0] * len(parts)

    def comes_back(number, *places):
        return [parts[i].push(Push(1, number, 0, 1, zeros[i])) for i in places]

    with serving(service) as (connect, _):
        client = connect(0, may_wait=True)
        for part in parts:
            part.leave(1)
        early = comes_back(1, 0, 1)
        push(client, zeros, versions, 1)
        assert all(call.done() for call in early)
        push(client, zeros, versions, 2)  # the next turn is that of the one that is back
        late = comes_back(1, *range(2, len(parts)))
        pending = client.start_push(zeros, versions, 1, 3)
        assert all(call.result(SECONDS).status == Status.OK for call in late)
        comes_back(2, *range(len(parts)))
        assert set(pending.answer().statuses) == {Status.OK}


@pytest.mark.parametrize("numbers", [(3, 0), (-1, 0), (0, 4), (0, -1)])
def test_a_farewell_that_makes_no_sense_is_an_error(numbers):
    service = start(RoundRobinEASGD(4))
    before = service.parts[0].state()
    with pytest.raises(ValueError, match="Received"):
        service.handle(1, Message(Kind.LEAVE, numbers))
    np.testing.assert_equal(service.parts[0].state(), before)


def test_a_center_that_is_not_finite_is_refused():
    service = start()
    with pytest.raises(ValueError, match=r"must be finite.*diverged"):
        service.client().restore([np.inf * part for part in ramp(1)])
    assert np.isfinite(service.center).all()
