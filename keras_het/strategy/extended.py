"""The part of the strategy that TensorFlow calls: devices, variables, reductions."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.resume import TrainingState
from keras_het.planning import ReplicaLayout
from keras_het.planning.argument_checks import check_number, check_one_of, expect
from keras_het.strategy.batches.uneven_per_replica import UnevenPerReplica
from keras_het.strategy.cluster import agreement, nccl
from keras_het.strategy.cluster.peer_watch import PeerWatch, naming_lost_workers
from keras_het.strategy.exact.created_in_scope import check_created_in_scope
from keras_het.strategy.exact.power_sgd import PowerSGD
from keras_het.strategy.hierarchical_all_reduce import HierarchicalAllReduce
from keras_het.strategy.sums_by_host import is_worth_it, num_keys
from keras_het.value_types import Leaf, Nest

if TYPE_CHECKING:
    from keras_het.strategy.cluster.cluster_config import ClusterConfig
    from keras_het.strategy.cluster.stop_request import StopRequest
    from keras_het.strategy.data_path import DataPath
    from keras_het.strategy.measure.compute_times import ComputeTimes
    from keras_het.strategy.measure.emulated_device import EmulatedDevice
    from keras_het.summation.group import SummationGroup

_logger = logging.getLogger(__name__)

_KEYS_PER_RANGE = 10_000
_SEED_STREAMS_PER_GROUP = 1000
_ALONE_BETWEEN_STEPS = (
    # begins as all messages that travel between workers do
    "The workers did not all reach {place}. Received: {place} on worker {worker}, in a callback "
    "between two steps, while others continue. Call it on every worker, outside of "
    "`if strategy.is_chief:`; losses and metrics are in `logs`."
)
# PeerWatch finds a silent worker first, and names it.
_MORE_SECONDS = 15.0


def check_how_gradients_travel(
    options: object, dtype: str | None, rank: int | None, summation: object
) -> None:
    """Refuse options, a type or a rank with which gradients cannot travel between workers."""
    expect(
        options is None or isinstance(options, private_api.CommunicationOptions),
        "tf.distribute.experimental.CommunicationOptions(implementation=..., bytes_per_pack=...)",
        communication_options=options,
    )
    if dtype is not None:
        check_one_of("communication_dtype", dtype, ("bfloat16", "float16"))
    check_number("powersgd_rank", rank, least=1, whole=True, or_none=True)
    if dtype is not None and rank is not None:
        raise ValueError(
            "Gradients of low rank travel in their own type. Received: communication_dtype="
            f"{dtype!r} with powersgd_rank={rank!r}. Leave one of them out."
        )
    given = f"powersgd_rank={rank!r}" if dtype is None else f"communication_dtype={dtype!r}"
    if summation is not None and (dtype, rank) != (None, None):
        raise ValueError(
            f"The CPUs of a summation sum whole gradients in float32. Received: {given} with "
            'gradient_reduction="summation". Leave one of them out.'
        )


# Variables are updated in replica context without a merge call, so that an optimizer may update
# them inside `tf.cond` (gradient accumulation, loss scaling).
class HeterogeneousExtended(private_api.CollectiveAllReduceExtended):
    """TensorFlow's collective machinery, for workers with unequal numbers of devices."""

    # `PeerWatch` watches the peers, and names the lost worker.
    _enable_check_health = False

    # What the strategy's calls, steps and callbacks share; its constructor gives it.
    cluster_config: ClusterConfig | None
    compute_times: ComputeTimes
    data_path: DataPath
    emulated_devices: tuple[EmulatedDevice, ...] | None
    micro_batch_sizes: Sequence[int] | None
    on_drift: str
    peer_watch: PeerWatch | None = None
    stop_request: StopRequest
    # Callbacks run before or after a step of `fit`, of which all workers have the same number.
    is_between_steps = False

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        communication_options: private_api.CommunicationOptions,
        devices: Sequence[str],
        startup_timeout_seconds: float = 300.0,
        peer_timeout_seconds: float = 30.0,
        on_join: Callable[[], PeerWatch | None] = lambda: None,
    ) -> None:
        private_api.leave_no_generated_files()
        self.training_state = TrainingState()
        self._on_join = on_join
        self._communication_dtype: tf.DType | None = None
        self._created: list[list[tf.Variable]] | None = None
        # Gradients of that size are summed before the others exist; 0 if all travel at once.
        self.bytes_per_bucket = int(communication_options.bytes_per_pack)
        self._power_sgd: PowerSGD | None = None
        self._requested_devices = tuple(devices)
        self._communication_options = communication_options
        self._timeouts = (startup_timeout_seconds, peer_timeout_seconds + _MORE_SECONDS)
        self._num_key_ranges = 0
        self._departure_barrier: Callable[[], tf.Tensor] | None = None
        # The host of each worker, if dense tensors are summed by host; see `SumsByHost`.
        self.hosts: list[int] | None = None
        super().__init__(
            container_strategy,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
        )
        # Without this, TensorFlow's own datasets agree on the end of the data in every step,
        # which costs a collective; ours have the same number of steps everywhere by construction.
        self.experimental_enable_get_next_as_optional = True

    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        del cluster_resolver
        device_type = self._requested_devices[0].split(":")[0]
        return (
            tuple(f"{worker_device}/device:{name}" for name in self._requested_devices),
            device_type,
        )

    def _initialize_local(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        devices: Sequence[str] | None = None,
    ) -> None:
        super()._initialize_local(cluster_resolver, devices=devices)
        self._use_hierarchical_all_reduce((len(self._devices),))

    def _initialize_multi_worker(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver
    ) -> None:
        # Enabled once more, collectives would forget which workers already wait in a group.
        self._std_server_started = private_api.listens_for_workers()
        with private_api.coordination_timeouts(*self._timeouts), _ended_after(self._timeouts[0]):
            super()._initialize_multi_worker(cluster_resolver)
        self.peer_watch = self._on_join()
        self._use_hierarchical_all_reduce((1,) * self._num_workers)
        with self._met_within(self._timeouts[0]):
            wants_nccl = nccl.is_wanted(self._local_device_type, self._communication_options)
            hosts = _hosts_of(cluster_resolver.cluster_spec())
            own = np.array(
                [[len(self._devices), wants_nccl, zlib.crc32(np.array(hosts).tobytes())]], np.int64
            )
            counts, agreements, digests = self.gather_over_workers(own).T.tolist()
        if all(agreements):
            self._use_nccl(cluster_resolver, tuple(counts))
        # NCCL knows itself what is near.
        uses_nccl = self._communication_options.implementation == nccl.Implementation.NCCL
        if len(set(digests)) == 1 and is_worth_it(hosts) and not uses_nccl:
            self.hosts = hosts
        self._use_hierarchical_all_reduce(tuple(counts))
        self._departure_barrier = self._host_all_reduce(self._new_collective_keys()).new_barrier()
        self._meeting = self._host_all_reduce(self._new_collective_keys())

    def _use_nccl(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        counts: tuple[int, ...],
    ) -> None:
        """Sum between workers by NCCL from now on, if it answers."""
        if nccl.share_a_gpu(self._devices, self.gather_over_workers):
            if self._id_in_cluster == 0:
                _logger.warning(
                    "Workers share a GPU, which NCCL refuses: their sums go through the hosts' "
                    "memory. Start one worker for each GPU."
                )
            if self._communication_options.implementation == nccl.Implementation.NCCL:
                self._communication_options = nccl.with_implementation(
                    self._communication_options, nccl.Implementation.RING
                )
                self._use_hierarchical_all_reduce(counts)
            return
        spec = cluster_resolver.cluster_spec()
        nccl.choose_interface(spec.task_address(self._task_type, self._task_id))
        self._communication_options = nccl.with_implementation(
            self._communication_options, nccl.Implementation.NCCL
        )
        self._use_hierarchical_all_reduce(counts)

        @tf.function(autograph=False)
        def first_sum() -> tf.Tensor:
            with tf.device(self._devices[0]):
                return self._cross_device_ops.sum_between_workers(tf.ones([1]))

        nccl.check_answers(first_sum, lambda message: self.abort_all(f"[[{message}]]"))

    def _met_within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """End the first collective of a strategy that not all workers make."""
        message = (
            f"The workers did not all make this strategy within {seconds:.0f} s. Received: a "
            f"HeterogeneousStrategy of worker {self._id_in_cluster} that others have not made; "
            "expected: all workers make the same strategies in the same order. Make them outside "
            "of `if strategy.is_chief`, or give more startup_timeout_seconds."
        )
        return agreement.patience(seconds, message, self.abort_all)

    def naming_lost_workers(self) -> contextlib.AbstractContextManager[None]:
        """Let errors of collectives run meanwhile say which worker was lost."""
        return naming_lost_workers(self.peer_watch)

    def agree(
        self,
        place: str,
        described: Mapping[str, str],
        *,
        leaves_loop: str | None = None,
        however_late: bool = False,
        **options: Any,
    ) -> np.ndarray:
        """Compare what the workers are about to do; all of them must call it."""
        # `leaves_loop` is the message for all if some continue a loop that this one has left;
        # without it they arrive in any case, unless a callback of this one is alone.
        if self.layout.num_workers == 1:
            return np.zeros([1, agreement.NUM_NOTES], np.int64)
        seconds = agreement.PATIENCE_SECONDS
        if leaves_loop is None and self.is_between_steps and not however_late:
            seconds = agreement.SECONDS_BETWEEN_STEPS
            leaves_loop = _ALONE_BETWEEN_STEPS.format(place=place, worker=self._id_in_cluster)
        with contextlib.ExitStack() as stack:
            if leaves_loop is not None:
                stack.enter_context(agreement.patience(seconds, leaves_loop, self.abort_all))
            stack.enter_context(self.naming_lost_workers())
            return agreement.agree(self, place, described, **options)

    @property
    def first_seed_stream(self) -> int:
        """First of this group's streams of random numbers; async workers draw from others."""
        config = self.cluster_config
        if config is None or not config.is_async_worker:
            return 0
        return _SEED_STREAMS_PER_GROUP * (1 + config.task_index)

    @property
    def steps_carry_flags(self) -> bool:
        """Whether a step traced now has a collective of all workers."""
        return self.layout.num_workers > 1 and not self.reduces_within_worker

    @property
    def steps_are_timed(self) -> bool:
        """Whether the training steps that are traced now read the clock."""
        times = self.compute_times
        return (times.is_measuring or times.phases.is_measuring) and not times.is_sampled_out

    @property
    def works_ahead(self) -> bool:
        """Whether a device of this worker computes while its host continues."""
        emulated = self.emulated_devices or ()
        return any("CPU" not in device for device in self.worker_devices) or any(
            each.asynchronous for each in emulated
        )

    def meet(self, values: np.ndarray) -> np.ndarray:
        """Concatenate an array of every worker; for `agreement` only."""
        # Separate collectives: whatever workers have traced and run before, those that meet match.
        with tf.device(self._worker_device):
            return np.asarray(self._meeting.gather_between_workers(tf.constant(values)))

    def gather_over_workers(self, values: np.ndarray) -> np.ndarray:
        """Concatenate an array of every worker, in worker order; all workers must call it."""
        with tf.device(self._worker_device):
            gathered = self.gather_rows_over_workers(tf.constant(values))
        return np.asarray(gathered)

    def abort_all(self, message: str) -> None:
        if self.summation is not None:
            self.summation.abort()
        private_api.abort_collectives_everywhere(message)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> Callable[[], tf.Tensor]:
        """Give all replicas of a new variable one value."""
        # The chief's value is sent later, and only if workers differ. In a graph, the tensor is
        # passed on to the other replicas: TensorFlow initializes variables before it runs the graph
        # only if their values read no other variable.
        places = {"replica_id": replica_id, "device": device, "primary_var": primary_var}
        create = functools.partial(super()._get_variable_creator_initial_value, **places)

        def initial_value() -> tf.Tensor:
            if tf.executing_eagerly():
                if replica_id or self.layout.num_workers == 1:
                    return create(**kwargs)()
                with tf.device(device):
                    value: Any = kwargs["initial_value"]
                    value = value() if callable(value) else value
                    value = getattr(value, "wrapped_value", value)
                    return tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            if replica_id == 0:
                self._value_in_graph = tf.convert_to_tensor(create(**kwargs)(), kwargs.get("dtype"))
            return tf.identity(self._value_in_graph)

        return initial_value

    @contextlib.contextmanager
    def agreeing_at_the_end(self) -> Iterator[None]:
        """Compare the values of new variables in one collective, when all have been created."""
        # One by one, hundreds of small variables take seconds.
        if self._created is not None or self.layout.num_workers == 1:
            yield
            return
        created: list[list[tf.Variable]] = []
        self._created = created
        try:
            yield
        finally:
            self._created = None
        agreement.agree_on_values(self, created)

    def wait_for_departure(self) -> None:
        """Wait until every worker leaves; return at once if there is only one."""
        # a worker that waits in `gather_over_workers` for something else does not count
        if self._departure_barrier is not None:
            self._departure_barrier()

    def _use_hierarchical_all_reduce(self, replicas_per_worker: tuple[int, ...]) -> None:
        """Replace TensorFlow's flat all-reduce."""
        # TensorFlow numbers groups in the order of their creation, and a worker with one device
        # makes fewer than one with two.
        self.layout = ReplicaLayout(replicas_per_worker, self._id_in_cluster)
        self._collective_keys = keys = self._new_collective_keys()
        self._cross_device_ops = self._hierarchical(self._devices, self.layout.num_replicas, keys)
        self._host_cross_device_ops = self._host_all_reduce(keys)
        if self.hosts is not None:
            key, hosts = (
                self._first_key + _KEYS_PER_RANGE // 2 + self.layout.num_workers,
                self.hosts,
            )
            for operations in (self._cross_device_ops, self._host_cross_device_ops):
                operations.sum_by_host(hosts, self._id_in_cluster, key)
                key += num_keys(hosts)

    def _new_collective_keys(self) -> private_api.CollectiveKeys:
        self._num_key_ranges += 1
        return private_api.CollectiveKeys(group_key_start=self._first_key)

    @property
    def _first_key(self) -> int:
        return 1 + int(self._collective_key_base) + self._num_key_ranges * _KEYS_PER_RANGE

    def use_summation(self, group: SummationGroup | None) -> None:
        """Make the reductions of graphs traced from now on go through a summation."""
        # Of this worker's host another one contributes if `group` is None.
        for operations in (self._cross_device_ops, self._host_cross_device_ops):
            operations.summation, operations.uses_summation = group, True

    @contextlib.contextmanager
    def reductions_within_worker(self) -> Iterator[None]:
        """Keep the reductions of graphs traced meanwhile among this worker's replicas."""
        operations = self._cross_device_ops
        operations.stays_within_worker = True
        try:
            yield
        finally:
            operations.stays_within_worker = False

    @property
    def reduces_within_worker(self) -> bool:
        return bool(self._cross_device_ops.stays_within_worker)

    @property
    def summation(self) -> SummationGroup | None:
        """The machines that sum; None if TensorFlow's collectives do."""
        return self._cross_device_ops.summation

    def _hierarchical(
        self, devices: Sequence[str], num_values: int, keys: private_api.CollectiveKeys
    ) -> HierarchicalAllReduce:
        return HierarchicalAllReduce(
            devices=devices,
            num_workers=self.layout.num_workers,
            num_replicas=num_values,
            options=self._communication_options,
            collective_keys=keys,
            first_local_key=self._first_key + _KEYS_PER_RANGE // 2 + self._id_in_cluster,
        )

    def _host_all_reduce(self, keys: private_api.CollectiveKeys) -> HierarchicalAllReduce:
        return self._hierarchical((self._worker_device,), self.layout.num_workers, keys)

    def gather_rows_over_workers(self, value: tf.Tensor) -> tf.Tensor:
        """Concatenate a tensor of every worker along its first dimension, in worker order."""
        return self._host_cross_device_ops.gather_between_workers(value)

    def sum_over_workers(self, value: tf.Tensor) -> tf.Tensor:
        """Sum a tensor in host memory over all workers; in a function that all workers call."""
        return self._host_cross_device_ops.sum_between_workers(value)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: tf.Variable) -> Iterator[None]:
        """Create variables beside another, also for an optimizer built outside of the scope."""
        strategy = self._container_strategy()
        is_inside = tf.distribute.get_strategy() is strategy
        scope = contextlib.nullcontext() if is_inside else strategy.scope()
        with scope, super().colocate_vars_with(colocate_with_variable):
            yield

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        check_created_in_scope(self._container_strategy(), [colocate_with_variable])

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> Any:
        beside = kwargs.get("colocate_with")
        if isinstance(beside, tf.Variable) and not self.variable_created_in_scope(beside):
            del kwargs["colocate_with"]  # of a single replica, whose variables are in one place
        variable = super()._create_variable(next_creator, **kwargs)
        if self.layout.num_workers > 1 and tf.executing_eagerly():
            copies = list(self._local_results(variable))
            if self._created is None:
                agreement.agree_on_values(self, [copies], str(kwargs.get("name")))
            else:
                self._created.append(copies)
        return variable

    @property
    def communication_dtype(self) -> tf.DType | None:
        """The type in which gradients travel to other workers; None for their own."""
        return self._communication_dtype if self.layout.num_workers > 1 else None

    def send_gradients_as(self, name: str | None) -> None:
        """Set the type in which gradients travel."""
        self._communication_dtype = None if name is None else tf.as_dtype(name)

    @property
    def power_sgd(self) -> PowerSGD | None:
        """How a step traced now sends matrices to other workers; None for whole ones."""
        return None if self.reduces_within_worker else self._power_sgd

    def send_low_rank(self, rank: int | None) -> None:
        """Let matrices travel between workers as ones of a low rank; None for whole ones."""
        self._power_sgd = None
        if rank is not None and self.layout.num_workers > 1:
            self._power_sgd = PowerSGD(int(rank), self._devices[0])

    @contextlib.contextmanager
    def sending_as(self, dtype: tf.DType | None) -> Iterator[None]:
        """Sum what is traced within in float32, but send it to other workers as another type."""
        self._cross_device_ops.sends_as = dtype
        try:
            yield
        finally:  # not what it was: replicas of a process enter one after another
            self._cross_device_ops.sends_as = None

    def _use_merge_call(self) -> bool:
        return False

    def all_reduce_in_replica(self, reduce_op: tf.distribute.ReduceOp, value: Nest) -> Nest:
        """Return the result of a replica context's `all_reduce`, without a gradient."""
        # TensorFlow keeps gradient functions of a graph, and with them its model, until the process
        # ends.
        return self._replica_ctx_all_reduce(reduce_op, value, private_api.CommunicationOptions())

    def sum_within_worker(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors of a replica context over the replicas of this process only."""

        def add_up(_: object, values: Sequence[tf.distribute.DistributedValues]) -> Nest:
            with self.reductions_within_worker():  # no replica continues meanwhile
                return self.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(v, v) for v in values])

        add_up = tf.autograph.experimental.do_not_convert(add_up)
        return list(tf.distribute.get_replica_context().merge_call(add_up, args=(list(tensors),)))

    def _replica_ctx_all_reduce(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Nest,
        options: private_api.CommunicationOptions | None = None,
    ) -> Nest:
        if len(self._devices) > 1 or tf.executing_eagerly():
            # The local sum needs the values of all local replicas together.
            return private_api.StrategyExtended._replica_ctx_all_reduce(
                self, reduce_op, value, options
            )
        options = options or private_api.CommunicationOptions()
        return self._cross_device_ops._all_reduce(reduce_op, value, 0, options)

    def _reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Leaf,
        destinations: Leaf,
        options: private_api.CommunicationOptions,
    ) -> Leaf:
        if tf.executing_eagerly() and isinstance(value, tf.Variable):
            # of a metric: each replica has its own samples' part
            self.agree("reading a metric", {}, about=value.name)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _local_results(self, value: Leaf) -> tuple[Leaf, ...]:
        # The inherited method bypasses the property, which moves batches to their devices.
        if isinstance(value, UnevenPerReplica):
            return value.values
        return super()._local_results(value)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.layout.local_replicas[replica_id]

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self.layout.local_replicas[0]

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.layout.num_replicas

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], Nest]
    ) -> Nest:
        values = [
            value_fn(tf.distribute.experimental.ValueContext(replica_id, self.layout.num_replicas))
            for replica_id in self.layout.local_replicas
        ]
        return private_api.regroup(values, always_wrap=True)


def _hosts_of(spec: tf.train.ClusterSpec) -> list[int]:
    """Return the host of each worker, numbered in the order of their first workers."""
    jobs = [job for job in ("chief", "worker") if job in spec.jobs]
    names = [address.rpartition(":")[0] for job in jobs for address in spec.job_tasks(job)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Kill a process that is still in this block, with a trace of where it is."""
    # TensorFlow waits indefinitely for a worker that dies while it joins, and holds the
    # interpreter: no Python thread could end that.
    with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):  # no real stderr
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
