"""Sum gradients of all workers on this machine's CPU, over TensorFlow's RPC."""

from __future__ import annotations

import atexit
import uuid

import tensorflow as tf

from keras_het.rpc.admission import Gate, Status, credential, model_fingerprint
from keras_het.rpc.secret import read_secret
from keras_het.rpc.server import FunctionServer, hello_function
from keras_het.value_types import Nest

NUM_SLOTS = 256
"""Partitions that one machine can sum; a graph that needs more uses all-reduce for the rest."""

# TensorFlow's name for a resource that nothing else can refer to.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"


def summation_credential(num_workers: int, num_spare: int) -> bytes:
    """Return the proof of shared secret and cluster that every request carries."""
    about = model_fingerprint([], [[num_workers, num_spare]], ["float32"], "summation 1")
    return credential(read_secret(), about)


class SummationService:
    """Server of `exchange`: takes a worker's part of a vector, returns the sum over all workers.

    Sums need no announcement. A request with the wrong credential, for another run, or out of turn
    changes nothing.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020, section 3 (Summation Service).
    """

    def __init__(
        self,
        address: str,
        num_workers: int,
        credential: bytes,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self.address = address
        self._table = SlotTable(num_workers, num_slots)
        self._exchange = tf.function(
            self._table.exchange,
            experimental_attributes={"_noinline": True},  # as in SummationClient
            input_signature=[
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.int64),
                tf.TensorSpec([None], tf.float32),
            ],
        )
        self.server = FunctionServer(address)
        gate, signature = Gate(credential), self._exchange.input_signature
        join = tf.function(self._join, input_signature=signature[:1], autograph=False)
        exchange = tf.function(self.exchange_locally, input_signature=signature, autograph=False)
        self.server.register("sum_hello", hello_function(), gate)
        self.server.register("sum_join", join, gate)
        self.server.register("sum_exchange", exchange, gate)

    def start(self) -> None:
        """Start answering."""
        self.server.start()
        # TensorFlow stops servers at process exit and waits until no call waits for a worker.
        atexit.register(self._table.close)

    def close(self) -> None:
        """Make the requests that wait for a worker fail, which lets the process exit."""
        atexit.unregister(self._table.close)
        self._table.close()
        self.server.close()

    def exchange_locally(
        self, run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Contribute from this process, without a message; return `Status` and the sum."""
        return self._exchange(run, slot, worker, step, values)

    def _join(self, run: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.not_equal(run, 0), lambda: self._table.join(run), _refused)


def _ok() -> tf.Tensor:
    return tf.constant(int(Status.OK))


def _refused() -> tf.Tensor:
    return tf.constant(int(Status.REFUSED))


class SlotTable:
    r"""Sums over workers, one slot for each partition, any shape.

    In step t, worker i contributes :math:`x_i`; the last to arrive adds up
    :math:`x_1 + x_2 + \dots + x_n`, in the order of the workers, so that the result has the same
    bits regardless of the order of arrival. Every worker's call returns the sum.

    Each slot has two places, for odd and even steps: no worker can be more than one step ahead of
    another, because it needs the other's contribution to continue. A call may be repeated (if its
    answer was lost); it counts once. Waiting calls occupy no TensorFlow thread: they wait in a
    queue with one token, which exists while the sum does and is handed from one call to the next.
    """

    def __init__(self, num_workers: int, num_slots: int = NUM_SLOTS) -> None:
        self._num_workers = num_workers
        self._num_slots = num_slots
        with tf.init_scope(), tf.device("CPU:0"):
            self._contributions = _variables(2 * num_slots * num_workers)
            self._sums = _variables(2 * num_slots)
            self._tokens = _queues(2 * num_slots)
            self._run = tf.Variable(0, dtype=tf.int64, trainable=False)
            # The latest step begun, and the latest one that each worker contributed to.
            self._begun = tf.Variable(tf.zeros([num_slots], tf.int64), trainable=False)
            self._latest = tf.Variable(
                tf.zeros([num_slots, num_workers], tf.int64), trainable=False
            )
            # Number of elements of the step in each place, as set by its first contribution.
            self._sizes = tf.Variable(tf.zeros([2 * num_slots], tf.int32), trainable=False)
            self._lock = tf.CriticalSection(shared_name="keras_het_slots")

    def join(self, run: tf.Tensor) -> tf.Tensor:
        """Begin a run unless it has begun; discard all state of the previous one."""

        def begin() -> tf.Tensor:
            self._begun.assign(tf.zeros([self._num_slots], tf.int64))
            self._latest.assign(tf.zeros([self._num_slots, self._num_workers], tf.int64))
            with tf.control_dependencies([self._empty_queues()]):
                self._run.assign(run)
            return _ok()

        with tf.device("CPU:0"):
            return self._lock.execute(lambda: tf.cond(tf.equal(self._run, run), _ok, begin))

    def exchange(
        self, run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Contribute, wait for the others, return `Status` and the sum; in a `tf.function`."""
        with tf.device("CPU:0"):
            in_range = (slot >= 0) & (slot < self._num_slots)
            in_range &= (worker >= 0) & (worker < self._num_workers)
            return tf.cond(
                in_range,
                lambda: self._exchange(run, slot, worker, step, values),
                lambda: (_refused(), tf.zeros([0])),
            )

    def _exchange(
        self, run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        place = 2 * slot + tf.cast(step % 2, tf.int32)
        is_new, is_repeated = self._lock.execute(
            lambda: self._begin(run, slot, worker, step, place, tf.size(values))
        )

        def contribute() -> tf.Tensor:
            where = tf.gather(self._contributions, place * self._num_workers + worker)
            stored = tf.raw_ops.AssignVariableOp(resource=where, value=values)
            with tf.control_dependencies([stored]):
                is_last = self._lock.execute(lambda: self._count(run, slot, worker, step))
            return tf.cond(is_last, lambda: self._add_up(place), _nothing)

        def wait() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([tf.cond(is_new, contribute, _nothing)]):
                taken = self._take(place)
            with tf.control_dependencies([taken]), tf.control_dependencies([self._give(place)]):
                return _ok(), _read(tf.gather(self._sums, place))

        return tf.cond(is_new | is_repeated, wait, lambda: (_refused(), tf.zeros([0])))

    def _begin(
        self,
        run: tf.Tensor,
        slot: tf.Tensor,
        worker: tf.Tensor,
        step: tf.Tensor,
        place: tf.Tensor,
        size: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return, under the lock, whether the contribution is new or known.

        A contribution that would leave the slot without a sum is not new: one from a worker that
        does not wait for the previous step, or one of another length. The step after next would
        wait for it while holding the lock.
        """
        is_current = tf.equal(run, self._run.read_value())
        latest = self._latest.read_value()[slot]
        is_due = tf.equal(step, latest[worker] + 1) & (tf.reduce_min(latest) + 1 >= step)
        is_repeated = is_current & tf.equal(step, latest[worker]) & (step > 0)
        begun = self._begun.read_value()[slot]
        sizes = self._sizes.read_value()
        is_new = is_current & is_due & ((begun < step) | tf.equal(size, sizes[place]))
        is_first = is_new & (begun < step)
        # The token of two steps ago says that its sum, which is about to be replaced, exists. Later
        # contributors must not find it: it would give them an answer from two steps ago.
        cleared = tf.cond(is_first & (step > 2), lambda: self._take(place), _nothing)
        begun = tf.where(is_first, step, begun)
        with tf.control_dependencies([cleared]):
            noted = self._begun.scatter_nd_update([[slot]], [begun])
            size = tf.where(is_first, size, sizes[place])
            noted_size = self._sizes.scatter_nd_update([[place]], [size])
        with tf.control_dependencies([noted, noted_size]):
            return tf.identity(is_new), tf.identity(is_repeated)

    def _count(
        self, run: tf.Tensor, slot: tf.Tensor, worker: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Record a contribution under the lock; return whether it completes the step.

        A contribution whose run has ended in the meantime does not count.
        """
        latest = self._latest.read_value()[slot, worker]
        is_counted = (latest >= step) | tf.not_equal(run, self._run.read_value())
        with tf.control_dependencies([is_counted]):
            noted = [tf.where(is_counted, latest, step)]
            counted = self._latest.scatter_nd_update([[slot, worker]], noted)
        with tf.control_dependencies([counted]):
            is_complete = tf.reduce_min(self._latest.read_value()[slot]) >= step
        return is_complete & ~is_counted

    def _add_up(self, place: tf.Tensor) -> tf.Tensor:
        first = place * self._num_workers
        total = _read(tf.gather(self._contributions, first))
        for worker in range(1, self._num_workers):
            total += _read(tf.gather(self._contributions, first + worker))
        where = tf.gather(self._sums, place)
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=where, value=total)]):
            return self._give(place)

    def _take(self, place: tf.Tensor) -> tf.Tensor:
        tokens = tf.gather(self._tokens, place)
        return tf.raw_ops.QueueDequeueV2(handle=tokens, component_types=[tf.bool])[0]

    def _give(self, place: tf.Tensor) -> tf.Tensor:
        tokens = tf.gather(self._tokens, place)
        given = tf.raw_ops.QueueEnqueueV2(handle=tokens, components=[tf.constant(True)])
        with tf.control_dependencies([given]):
            return tf.constant(True)

    def _empty_queues(self) -> Nest:
        def body(place: tf.Tensor) -> tf.Tensor:
            size = tf.raw_ops.QueueSizeV2(handle=tf.gather(self._tokens, place))
            taken = tf.cond(size > 0, lambda: self._take(place), _nothing)
            with tf.control_dependencies([taken]):
                return place + 1

        return tf.while_loop(lambda place: place < 2 * self._num_slots, body, [tf.constant(0)])

    def close(self) -> None:
        for place in range(2 * self._num_slots):
            tf.raw_ops.QueueCloseV2(handle=self._tokens[place], cancel_pending_enqueues=True)


def _nothing() -> tf.Tensor:
    return tf.constant(True)


def _read(handle: tf.Tensor) -> tf.Tensor:
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    return tf.ensure_shape(value, [None])


def _variables(count: int) -> tf.Tensor:
    """Return handles of variables of any shape, selectable by number in the graph."""
    shape = tf.TensorShape(None)
    options = {"dtype": tf.float32, "shape": shape, "shared_name": _ANONYMOUS, "container": ""}
    return tf.stack([tf.raw_ops.VarHandleOp(**options) for _ in range(count)])


def _queues(count: int) -> tf.Tensor:
    """Return handles of queues with one token each."""
    name = f"keras_het_{uuid.uuid4().hex}"

    # In one function, because each would take a millisecond on its own.
    @tf.function
    def make() -> tf.Tensor:
        options = {"component_types": [tf.bool], "shapes": [[]], "capacity": 1}
        queues = [
            tf.raw_ops.FIFOQueueV2(shared_name=f"{name}_{i}", **options) for i in range(count)
        ]
        return tf.stack(queues)

    return make()
