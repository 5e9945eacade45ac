"""Bad requests to the functions of a summation service change nothing; sums stay right."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from wrong_tokens import wrong_token

from keras_het import private_api
from keras_het.asynchronous.parameter_service import Status, credential
from keras_het.rpc.admission import token
from keras_het.summation.service import SummationService

GOOD = credential(b"a secret of these tests", "summation")
NUM_WORKERS, NUM_SLOTS, RUN = 3, 4, 77
BAD_A_ROUND, TIMEOUT = 50, 60.0
STATUS = tf.TensorSpec([], tf.int32)
SPECS = {"sum_exchange": (STATUS, tf.TensorSpec(None, tf.float32)), "sum_join": STATUS}
EXTREMES = [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-37, -0.0]


def good_token(function):
    return token(GOOD, function, tf.timestamp())


class Requests:
    """Random requests, one or more of whose values are wrong."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def values(self, size):
        values = self.random.normal(size=size).astype("float32")
        extreme = self.random.random(size) < 0.1
        return np.where(extreme, self.random.choice(EXTREMES, size), values).astype("float32")

    def make(self, latest):
        """Function and arguments, where all workers have contributed to the steps `latest`."""
        if self.random.integers(5) == 0:
            return "sum_join", self.one_of(self.bad_joins())
        slot = int(self.random.integers(NUM_SLOTS))
        due = int(latest[slot]) + 1
        arguments = {
            "token": good_token("sum_exchange"),
            "run": np.int64(RUN),
            "slot": np.int32(slot),
            "worker": np.int32(self.random.integers(NUM_WORKERS)),
            "step": np.int64(due),
            "values": self.values(int(self.random.integers(70))),
        }
        bad = self.bad_values(due)
        for name in self.random.choice(list(bad), self.random.integers(1, 4), replace=False):
            arguments[str(name)] = self.one_of(bad[str(name)])
        return "sum_exchange", list(arguments.values())

    def bad_joins(self):
        run = np.int64(self.random.integers(-(2**62), 2**62))
        return [
            (good_token("sum_join"), np.int64(0)),
            (wrong_token(self.random, GOOD, "sum_join"), run),
            (wrong_token(self.random, GOOD, "sum_join"), np.int64(RUN)),
        ]

    def bad_values(self, due):
        """What is refused in the place of each argument; other types and shapes are too."""
        far = self.random.integers(2, 2**61)
        return {
            "token": [wrong_token(self.random, GOOD, "sum_exchange")],
            "run": [*map(np.int64, (0, -RUN, RUN + 1, 2**63 - 1, -(2**63)))],
            "slot": [*map(np.int32, (-1, NUM_SLOTS, 2**31 - 1, -(2**31)))],
            "worker": [*map(np.int32, (-1, NUM_WORKERS, 2**31 - 1, -(2**31)))],
            # the step before would be a repetition, which is answered
            "step": [*map(np.int64, (0, due + 1, due + far, due - far, -due, 2**63 - 1, -(2**63)))],
        }

    def one_of(self, choices):
        return choices[self.random.integers(len(choices))]


@pytest.fixture
def service(logical_devices):
    service = SummationService(free_address(), NUM_WORKERS, GOOD, NUM_SLOTS)
    service.start()
    yield service
    service.close()


class Client:
    def __init__(self, service):
        self.rpc = private_api.RpcClient(service.address, "fuzzer", timeout_in_ms=5_000)

    def call(self, function, arguments):
        """Status, or None for an error, and what came with it."""
        tensors = [tf.constant(argument) for argument in arguments]
        answer = self.rpc.call(function, tensors, output_specs=SPECS[function])
        if not bool(answer.is_ok()):
            return None, None
        status, *sums = tf.nest.flatten(answer.get_value())
        return int(status), sums[0].numpy() if sums else None

    def exchange(self, run, slot, worker, step, values):
        numbers = [np.int64(run), np.int32(slot), np.int32(worker), np.int64(step)]
        return self.call("sum_exchange", [good_token("sum_exchange"), *numbers, values])


def snapshot(service, has_sums):
    table = service._table
    state = [table._run, table._begun, table._latest, table._sizes]
    queues = [tf.raw_ops.QueueSizeV2(handle=handle) for handle in table._tokens]
    handles = [*table._sums, *table._contributions] if has_sums else []
    read = [tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.float32) for h in handles]
    return [np.array(value).tobytes() for value in [*state, *queues, *read]]


def sum_all(client, pool, run, steps, random):
    """All workers contribute to the next step of each slot, and get what numpy adds up."""
    for slot in range(NUM_SLOTS):
        steps[slot] += 1
        size = int(random.random.integers(1, 300))
        values = [random.values(size) for _ in range(NUM_WORKERS)]
        answers = [
            pool.submit(client.exchange, run, slot, worker, steps[slot], own)
            for worker, own in enumerate(values)
        ]
        with np.errstate(all="ignore"):
            expected = (values[0] + values[1]) + values[2]
        for answer in answers:
            status, total = answer.result(TIMEOUT)
            assert status == Status.OK
            np.testing.assert_array_equal(total, expected)


@pytest.mark.quick("4-4")
@pytest.mark.parametrize(("seed", "rounds"), [(3, 12), (4, 12), (4, 4)])
def test_bad_requests_change_nothing(service, seed, rounds):
    client, requests = Client(service), Requests(seed)
    steps, accepted = [0] * NUM_SLOTS, []
    assert client.call("sum_join", [good_token("sum_join"), np.int64(RUN)])[0] == Status.OK
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        for number in range(rounds):
            before = snapshot(service, has_sums=number > 1)  # of odd and even steps
            for _ in range(BAD_A_ROUND):
                function, arguments = requests.make(steps)
                status, _ = client.call(function, arguments)
                if status not in (None, Status.REFUSED):
                    accepted.append((function, arguments))
            assert accepted == []
            assert snapshot(service, has_sums=number > 1) == before
            sum_all(client, pool, RUN, steps, requests)
        # the next run finds nothing of this one
        assert client.call("sum_join", [good_token("sum_join"), np.int64(RUN + 1)])[0] == Status.OK
        sum_all(client, pool, RUN + 1, [0] * NUM_SLOTS, requests)
