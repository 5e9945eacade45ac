"""The service and its client over a real connection, and who is let in."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from service_doubles import PROOF as GOOD
from service_doubles import client_within, exchange_within, flat, shared_service, start_service
from service_doubles import connect as connect_to

from keras_het.asynchronous.parameter_service import (
    FloatWire,
    ParameterClient,
    ParameterService,
    Partitions,
    Status,
    TopKWire,
    credential,
    model_fingerprint,
)
from keras_het.asynchronous.parameter_service import service as parameter_service
from keras_het.asynchronous.rules import (
    AsyncEASGD,
    AsyncSGD,
    DelayCompensated,
    Delta,
    ElasticAveraging,
    RoundRobinEASGD,
)
from keras_het.rpc.secret import read_secret

SHAPES = ((3, 4), (5,), ())
PARTITIONS = Partitions(SHAPES, partition_size=7)  # 18 elements: three of six


def start(rule, num_clients=4, make=shared_service, **options):
    service = make(PARTITIONS, rule, num_clients, **options)
    service.set_center([tf.ones(shape) for shape in SHAPES])
    return service


def connect(service, client=0, proof=GOOD, **options):
    return ParameterClient(service.address, PARTITIONS, proof, client, **options)


@pytest.fixture
def service(logical_devices):
    return start(Delta())


def zeros():
    return [tf.zeros([size]) for size in PARTITIONS.sizes]


def ramp(scale=1.0):
    return PARTITIONS.pack([scale * tf.reshape(tf.range(18.0)[:12], (3, 4)), tf.ones([5]), 2.0])


def test_push_in_a_function(service):
    client = connect(service)

    @tf.function
    def steps(number):
        versions = tf.zeros([3], tf.int64)
        partitions = zeros()
        for _ in tf.range(number):
            answer = client.push(ramp(), versions, 8, zeros())
            versions, partitions = answer.versions, answer.partitions
        return versions, partitions

    versions, partitions = steps(5)
    np.testing.assert_array_equal(versions, [5] * 3)
    np.testing.assert_allclose(flat(partitions), 1 + 5 * flat(ramp()))
    steps(5)
    np.testing.assert_array_equal(service.versions(), [10] * 3)


@pytest.mark.full
def test_local_and_remote_exchanges_are_the_same(logical_devices):
    remote, local = start(ElasticAveraging(0.3)), start(ElasticAveraging(0.3), num_clients=5)
    clients = connect(remote, 1), client_within(local, 1)
    for scale in (1.0, 3.0):
        pushes = [ramp(scale), tf.zeros([3], tf.int64), 4, zeros()]
        answer, expected = (client.push(*pushes) for client in clients)
        np.testing.assert_array_equal(flat(answer.partitions), flat(expected.partitions))
        np.testing.assert_array_equal(answer.versions, expected.versions)
    for got, want in zip(remote.center(), local.center(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.full
def test_a_client_beside_the_center_is_not_rounded_and_never_too_stale(logical_devices):
    wire = FloatWire("float16")
    service = start(Delta(), wire=wire, staleness_bound=0)
    own, other = client_within(service), connect(service, 1, wire=wire)
    other.push(ramp(), tf.zeros([3], tf.int64), 8, zeros())
    change = [part / 3 for part in ramp()]
    answer = own.push(change, tf.zeros([3], tf.int64), 8, zeros())
    np.testing.assert_array_equal(answer.statuses, [Status.OK] * 3)
    np.testing.assert_array_equal(flat(answer.partitions), 1 + flat(ramp()) + flat(change))
    np.testing.assert_array_equal(flat(own.pull(zeros()).partitions), flat(answer.partitions))


def huge(value):
    return [tf.one_hot(0, size, np.float32(value), 0.0) for size in PARTITIONS.sizes]


TOO_LARGE = {  # changes of which the last one would leave something that is not finite
    "delta": (Delta, [3e38, 3e38]),
    "elastic": (lambda: ElasticAveraging(0.9), [-3e38, 3e38]),
    "momentum": (lambda: AsyncSGD(0.5, momentum=0.9), [1.5e38, 3e38]),
    "samples": (lambda: AsyncSGD(0.5, reference_samples=32), [1e34]),
    "mean squares alone": (lambda: AsyncSGD(optimizer="adam"), [1e30]),
    "compensation": (lambda: DelayCompensated(0.5, 1.0, 1), [1e20]),
    "compensation by mean squares": (lambda: DelayCompensated(0.5, 1.0, 1, decay=0.9), [1e20]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TOO_LARGE)
def test_finite_pushes_leave_center_and_state_finite(logical_devices, name):
    make_rule, changes = TOO_LARGE[name]
    partitions = Partitions(((3,),))
    service = start_service(partitions, make_rule(), 1)
    client = connect_to(service)

    def push(change, samples=32.0):
        answer = client.push([change], service.versions(), samples, [tf.zeros([3])])
        return int(answer.statuses[0])

    def found():
        return {**service.state(), "center": flat(service.center_partitions())}

    for change in ([1.0, 2.0, 3.0], *([value, 0.0, 0.0] for value in changes[:-1])):
        assert push(tf.constant(change)) == Status.OK
    before = found()
    assert push(tf.constant([changes[-1], 0.0, 0.0]), 2.0**31) == Status.NOT_FINITE
    for key, value in found().items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
        assert np.isfinite(value).all()
    assert push(tf.constant([1.0, 2.0, 3.0])) == Status.OK
    service.close()


@pytest.mark.full
def test_a_rule_may_keep_what_is_not_finite(logical_devices):
    class Smallest(Delta):
        """Keeps the smallest change, at first none."""

        name = "smallest"

        def create_slots(self, center):
            return {"least": tf.Variable(tf.fill(center.shape, np.inf), trainable=False)}

        def update(self, center, slots, change, meta):
            # the first element is compared only
            compared = tf.where(tf.range(change.shape[0]) > 0, np.float32(np.inf), change)
            slots["least"].assign(tf.minimum(compared, slots["least"]))
            return super().update(center, slots, change, meta)

    service = start(Smallest(), make=start_service)
    for _ in range(2):
        answer = connect(service).push(ramp(), service.versions(), 8, zeros())
        np.testing.assert_array_equal(answer.statuses, [Status.OK] * 3)
    service.close()


def test_a_local_push_of_one_bad_partition_takes_the_others(logical_devices):
    service = start(Delta())
    good = ramp()
    answers = exchange_within(service, 0, 8.0, [good[0], np.inf * good[1], good[2]])
    np.testing.assert_array_equal(service.versions(), [1, 0, 1])
    for place in (0, 2):
        np.testing.assert_array_equal(answers[place], service.center_partitions()[place])


@pytest.mark.quick("nan-0-0-1-2", "1.0-0-0-nan-2", "1.0-4-0-1-3")
@pytest.mark.parametrize(
    ("change", "client", "version", "samples", "status"),
    [
        (np.nan, 0, 0, 1, Status.NOT_FINITE),
        (np.inf, 0, 0, 1, Status.NOT_FINITE),
        (1.0, 0, 0, np.nan, Status.NOT_FINITE),
        (1.0, 0, 0, 3e38, Status.NOT_FINITE),
        (1.0, 4, 0, 1, Status.UNKNOWN_CLIENT),
        (1.0, -1, 0, 1, Status.UNKNOWN_CLIENT),
        (1.0, 0, -5, 1, Status.UNKNOWN_CLIENT),
    ],
)
def test_bad_pushes_change_nothing(service, change, client, version, samples, status):
    changes = [tf.fill([size], tf.constant(change, tf.float32)) for size in PARTITIONS.sizes]
    versions = tf.fill([3], tf.constant(version, tf.int64))
    answer = connect(service, client).push(changes, versions, samples, ramp())
    np.testing.assert_array_equal(answer.statuses, [status] * 3)
    np.testing.assert_array_equal(flat(answer.partitions), flat(ramp()))  # the fallback
    np.testing.assert_array_equal(service.versions(), [0] * 3)
    np.testing.assert_array_equal(service.center()[0], np.ones((3, 4)))


@pytest.mark.parametrize(
    "proof", [b"", GOOD[:-1], GOOD + b"x", credential(b"0123456789abcdef", "another model")]
)
def test_a_wrong_credential_is_refused(service, proof):
    with pytest.raises(PermissionError, match="secret, model"):
        connect(service, proof=proof)
    client = connect(service)
    client._services[0].credential = proof  # says hello well and then tries
    for answer in (client.push(ramp(), tf.zeros([3], tf.int64), 8, zeros()), client.pull(zeros())):
        np.testing.assert_array_equal(answer.statuses, [Status.REFUSED] * 3)
        np.testing.assert_array_equal(flat(answer.partitions), np.zeros(18))
    np.testing.assert_array_equal(service.versions(), [0] * 3)


@pytest.mark.parametrize("ask", ["export", "latest_sequence", "close_training"])
def test_a_later_refusal_is_no_answer(service, ask):
    client = connect(service)
    client._services[0].credential = b"of another training"
    with pytest.raises(ConnectionError, match=r"REFUSED.*serves another training now"):
        getattr(client, ask)()


def test_fingerprint_depends_on_everything():
    given = (["a", "b"], [(2, 3), (4,)], ["float32"] * 2, "delta")
    others = [
        (["a", "c"], *given[1:]),
        (given[0], [(3, 2), (4,)], *given[2:]),
        (*given[:2], ["float32", "float16"], given[3]),
        (*given[:3], "async_sgd"),
    ]
    prints = {model_fingerprint(*each) for each in (given, *others)}
    assert len(prints) == 5


def test_secret(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    file = {"KERAS_HET_SERVICE_SECRET_FILE": str(tmp_path / "secret")}
    text = {"KERAS_HET_SERVICE_SECRET": "0123456789abcdef"}
    assert read_secret(file) == read_secret(text) == b"0123456789abcdef"
    for environ, match in (({}, "neither"), ({**file, **text}, "both")):
        with pytest.raises(ValueError, match=match):
            read_secret(environ)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        read_secret({"KERAS_HET_SERVICE_SECRET": "short"})


@pytest.mark.quick("float16-0.00048828125")
@pytest.mark.parametrize(
    ("wire", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float32", 0.0)]
)
def test_half_precision(logical_devices, wire, step):
    service = start(Delta(), wire=FloatWire(wire))
    client = connect(service, wire=FloatWire(wire))
    changes = [part / 3 for part in ramp()]
    answer = client.push(changes, tf.zeros([3], tf.int64), 8, zeros())
    np.testing.assert_array_equal(answer.statuses, [Status.OK] * 3)
    np.testing.assert_allclose(flat(answer.partitions), 1 + flat(changes), rtol=2 * step + 1e-7)
    assert (np.abs(flat(answer.residuals)) <= step * np.abs(flat(changes)) + 1e-9).all()
    assert bool(np.abs(flat(answer.residuals)).max() > 0) == (wire != "float32")


@pytest.mark.parametrize("size", [1, 6, 7])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_two_half_values_travel_in_the_bits_of_one(logical_devices, wire, size):
    values, form = tf.random.normal([size]) * 100, FloatWire(wire)
    (sent,), residual = form.encode(values)
    assert sent.dtype == tf.float32 and sent.shape == form.signature(size)[0].shape
    assert sent.shape == [(size + 1) // 2]
    rounded = tf.cast(tf.cast(values, wire), tf.float32)
    np.testing.assert_array_equal(form.decode([sent], size), rounded)
    np.testing.assert_array_equal(form.decode_answer(form.encode_answer(values), size), rounded)
    np.testing.assert_array_equal(rounded + residual, values)


def test_error_feedback_loses_nothing(logical_devices):
    # numpy's reference: what is not sent is kept and added to the next change
    service = start(Delta(), wire=TopKWire(0.3))
    client = connect(service, wire=TopKWire(0.3))
    random = np.random.default_rng(0)
    kept = [np.zeros(size, "float32") for size in PARTITIONS.sizes]
    center = [np.ones(size, "float32") for size in PARTITIONS.sizes]
    residuals = zeros()
    total = np.zeros(18)
    for _ in range(20):
        change = [random.normal(size=size).astype("float32") for size in PARTITIONS.sizes]
        total += flat(change)
        changes = [a + b for a, b in zip(change, residuals, strict=True)]
        answer = client.push(changes, tf.zeros([3], tf.int64), 8, zeros())
        residuals = answer.residuals
        for index, part in enumerate(change):
            wanted = kept[index] + part
            count = max(1, round(0.3 * len(part)))
            largest = np.argsort(-np.abs(wanted))[:count]
            center[index][largest] += wanted[largest]
            wanted[largest] = 0
            kept[index] = wanted
        np.testing.assert_allclose(flat(answer.partitions), flat(center), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(residuals), flat(kept), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(flat(center) - 1 + flat(kept), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FloatWire("int8"), "float16"),
        (lambda: TopKWire(0), "above 0"),
        (lambda: TopKWire(1.5), "at most 1"),
    ],
)
def test_wrong_wires(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_numbered_push_counts_once(service):
    client = connect(service)
    changes, versions = ramp(), tf.zeros([3], tf.int64)
    first = client.push(changes, versions, 1, zeros(), sequence=1)
    again = client.push(changes, versions, 1, zeros(), sequence=1)
    assert first.statuses.numpy().tolist() == [Status.OK] * 3
    assert again.statuses.numpy().tolist() == [Status.REPEATED] * 3
    for one, other in zip(first.partitions, again.partitions, strict=True):
        np.testing.assert_array_equal(one, other)
    client.push(changes, versions, 1, zeros(), sequence=2)
    assert service.versions().tolist() == [2, 2, 2]


def test_a_push_beyond_the_staleness_bound_is_not_taken(logical_devices):
    """A version to come is as stale as one long past: its worker saw another service, or lies."""
    service = start(Delta(), staleness_bound=1)
    fast, slow = connect(service, 0), connect(service, 1)
    for version in range(2):
        fast.push(ramp(), tf.fill([3], tf.cast(version, tf.int64)), 1, zeros())
    center = flat(service.center_partitions())
    for version in (0, 3, 500, 2**62):
        answer = slow.push(ramp(), tf.fill([3], tf.constant(version, tf.int64)), 1, zeros())
        assert answer.statuses.numpy().tolist() == [Status.STALE] * 3
        assert service.versions().tolist() == [2, 2, 2] == answer.versions.numpy().tolist()
        np.testing.assert_array_equal(flat(answer.partitions), center)
        np.testing.assert_array_equal(flat(service.center_partitions()), center)
    answer = slow.push(ramp(), answer.versions, 1, zeros())
    assert answer.statuses.numpy().tolist() == [Status.OK] * 3


@pytest.mark.full
@pytest.mark.parametrize("ratio", [1.0, 0.7, 0.5])
def test_largest_values_of_the_largest_partition_fit_into_a_message(logical_devices, ratio):
    wire = TopKWire(ratio)
    largest = wire.largest_partition
    assert round(ratio * largest) * 8 <= 4_096_000 < round(ratio * (largest + 2)) * 8 + 8
    partitions = Partitions(((1_100_000,),), largest, fewest=1)
    service = start_service(partitions, Delta(), 1, wire=wire)
    client = connect_to(service, wire=wire)
    changes = partitions.pack([tf.random.normal([1_100_000])])
    versions = np.zeros(len(partitions.sizes), np.int64)
    answer = client.push(changes, versions, 1, changes)
    assert set(answer.statuses.numpy()) == {Status.OK}
    whole = flat(answer.partitions) + flat(answer.residuals)
    np.testing.assert_array_equal(whole, flat(changes))
    service.close()


def test_partitions_that_are_too_large_for_their_format_are_refused(service):
    partitions = Partitions(((1_024_000,),), 1_024_000, fewest=1)
    match = r"'top-1.0'.*1024000 elements.*partition_size=512000"
    with pytest.raises(ValueError, match=match):
        ParameterService(free_address(), partitions, Delta(), GOOD, 1, wire=TopKWire(1.0))
    with pytest.raises(ValueError, match=match):
        ParameterClient(service.address, partitions, GOOD, 0, wire=TopKWire(1.0))


@pytest.mark.quick("rule1")
@pytest.mark.parametrize(
    "rule",
    [DelayCompensated(0.1, 1.0, num_workers=3), RoundRobinEASGD(3), AsyncEASGD(None, None, 3)],
)
def test_a_rule_that_was_made_for_fewer_workers_is_refused(logical_devices, rule):
    ParameterService(free_address(), PARTITIONS, rule, GOOD, 3)
    with pytest.raises(ValueError, match=r"made for 3 workers.*num_workers=4"):
        ParameterService(free_address(), PARTITIONS, rule, GOOD, 4)


class Unhurried(ElasticAveraging):
    """Takes pushes without a lock, and only when it may."""

    name = "unhurried"
    is_atomic = False

    def __init__(self):
        super().__init__(0.5)
        self.entered = tf.queue.FIFOQueue(9, tf.bool, shapes=[])
        self.may_go = tf.queue.FIFOQueue(9, tf.bool, shapes=[])

    def update(self, center, slots, change, meta):
        with tf.control_dependencies([self.entered.enqueue(True)]):
            gone = self.may_go.dequeue()
        with tf.control_dependencies([gone]):
            return super().update(center, slots, change, meta)


class UnhurriedUnderLock(Unhurried):
    """Takes pushes under the lock of their partition."""

    name = "unhurried_under_lock"
    is_atomic = True


@pytest.mark.full
def test_as_many_partitions_as_locks_are_updated_at_the_same_time(logical_devices, monkeypatch):
    monkeypatch.setattr(parameter_service, "usable_cpus", lambda: 8.0)  # two locks
    rule, statuses = UnhurriedUnderLock(), []
    service = start(rule, make=start_service)

    def push(number):
        answer = connect(service, number).push(ramp(), tf.zeros([3], tf.int64), 1, zeros())
        statuses.extend(answer.statuses.numpy().tolist())

    threads = [threading.Thread(target=push, args=(i,), daemon=True) for i in (1, 2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while int(rule.entered.size()) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    threading.Event().wait(0.5)  # without a lock, the other worker's two enter now
    entered = int(rule.entered.size())
    for _ in range(2 * len(PARTITIONS.sizes)):
        rule.may_go.enqueue(True)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert entered == 2
    assert statuses == [Status.OK] * 6
    np.testing.assert_array_equal(service.versions(), [2] * 3)
    service.close()


@pytest.mark.full
@pytest.mark.parametrize("cpus", [1.5, 8.0])
def test_partitions_that_share_a_lock_are_all_updated(logical_devices, monkeypatch, cpus):
    monkeypatch.setattr(parameter_service, "usable_cpus", lambda: cpus)
    num_locks = parameter_service.number_of_locks()
    assert num_locks == (1 if cpus < 4 else 2)
    partitions = Partitions(((2 * num_locks + 1,),), partition_size=1)
    service = start_service(partitions, AsyncSGD(1.0), 2)
    client = connect_to(service)
    gradients = [tf.ones([1])] * len(partitions.sizes)
    versions = tf.zeros([len(partitions.sizes)], tf.int64)
    answer = client.push(gradients, versions, 1, gradients)
    np.testing.assert_array_equal(answer.statuses, int(Status.OK))
    np.testing.assert_array_equal(flat(service.center_partitions()), -1)
    service.close()


@pytest.mark.quick("True")
@pytest.mark.parametrize("remote", [False, True])
def test_the_center_is_final_when_training_was_closed_without_a_lock_too(logical_devices, remote):
    rule = Unhurried()
    service = start(rule, make=start_service)
    pusher, leader = connect(service, 1), connect(service)
    leader = leader if remote else client_within(service)
    close, statuses, found = leader.close_training, [], []

    def push():
        answer = pusher.push(ramp(5.0), tf.zeros([3], tf.int64), 1, zeros())
        statuses.extend(answer.statuses.numpy().tolist())

    def end():
        close()
        found.append(flat(service.center_partitions()))

    threads = [threading.Thread(target=work, daemon=True) for work in (push, end)]
    threads[0].start()
    for _ in range(2):  # that are under way at a time
        rule.entered.dequeue()
    threads[1].start()
    threads[1].join(timeout=1)  # it must not come to its end
    for _ in range(2):
        rule.may_go.enqueue(True)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert statuses == [Status.OK, Status.OK, Status.CLOSED]
    np.testing.assert_array_equal(found[0], flat(service.center_partitions()))
    assert np.abs(found[0][:14] - 1).max() > 1
