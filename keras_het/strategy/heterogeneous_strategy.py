"""The public strategy: `model.fit` on machines that do not match."""

from __future__ import annotations

import atexit
import functools
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.model_strategy import OwnStrategy
from keras_het.fit.session import FitSession
from keras_het.fit.share_bounds import MicroBatchSize, read_micro_batch_size
from keras_het.loader import FileShardedDataset, GlobalOrderDataset
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.planning import ReplicaLayout
from keras_het.planning.argument_checks import check_number
from keras_het.planning.replica_layout import weights_of_replicas
from keras_het.planning.shares import Weights
from keras_het.seen_versions import check_keras_backend
from keras_het.strategy import keras_calls
from keras_het.strategy.batches.uneven_per_replica import UnevenPerReplica
from keras_het.strategy.cluster import agreement
from keras_het.strategy.cluster.peer_watch import (
    PeerWatch,
    install_report,
    read_peer_timeout,
)
from keras_het.strategy.cluster.stop_request import StopRequest
from keras_het.strategy.cluster.stop_signals import (
    SIGNALS,
    leave_quickly,
    leave_together,
    stop_signals,
)
from keras_het.strategy.data_path import DataPath, with_own_batches
from keras_het.strategy.drift import check_on_drift
from keras_het.strategy.exact.keras_hooks import keras_hooks, own_function
from keras_het.strategy.exact.keras_step import run_predict_step, run_train_or_test_step
from keras_het.strategy.exact.xla import compiled_as_a_whole
from keras_het.strategy.extended import HeterogeneousExtended, check_how_gradients_travel
from keras_het.strategy.measure.compute_times import ComputeTimes
from keras_het.strategy.measure.emulated_device import (
    read_emulated_devices,
    warn_of_emulated_devices,
    warn_that_nothing_waits,
)
from keras_het.strategy.measure.sampled_steps import SampledSteps
from keras_het.strategy.membership import (
    Membership,
    check_is_no_summation_machine,
    choose_devices,
    find_cluster,
    next_collective_key_base,
    share_news,
    wait_for_workers,
    watch_peers,
    watch_summation,
)
from keras_het.summation import Summation, read_gradient_reduction
from keras_het.value_types import Nest


class HeterogeneousStrategy(OwnStrategy):
    r"""Synchronous training over devices of different speeds, with the numbers of one device.

    Use it like any `tf.distribute.Strategy`, around stock Keras code. Replica i of N gets
    :math:`b_i` of the B samples of every global batch, in proportion to its share weight. One step
    changes the weights as one device would on the whole batch:

    .. math:: g = \sum_{i=1}^{N} \frac{b_i}{B} \nabla L_i, \qquad \sum_i b_i = B,

    for any shares, zero included. Loss and metrics cover the whole batch on every worker.

    Several processes form one cluster through `TF_CONFIG` (or a cluster resolver such as
    `tf.distribute.cluster_resolver.SlurmClusterResolver`). Workers may have different numbers of
    devices, all of one type.

    Args:
        devices: names of this process's devices, such as ["GPU:0", "GPU:1"]; all of one type.
            Default: all GPUs, or all (logical) CPUs without a GPU; workers of a cluster without
            GPU use CPU:0.
        share_weights: one non-negative weight per replica of all workers, such as [4, 2, 1] or {0:
            4, 1: 2, 2: 1}. Whole samples are apportioned by largest remainder. Default: equal
            shares.
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`. Default: `TF_CONFIG`.
        communication_options: `tf.distribute.experimental.CommunicationOptions`. Default: NCCL
            between workers with GPUs, an error if its first sum takes more than 60 s; NCCL between
            the GPUs of a worker, or copies where it cannot; rings over gRPC between CPUs. With
            `bytes_per_pack`, gradients are summed in buckets of that size while the backward pass
            computes others.
        gradient_reduction: how gradients (and whatever else a step sums) are added up between
            workers: "all_reduce" by TensorFlow's collectives; "summation" by the CPUs of all
            workers and of the spare machines in TF_CONFIG's job `summation`, or a
            `keras_het.summation.Summation` with settings. Summation needs a shared secret in the
            environment.
        startup_timeout_seconds: how long to wait for workers that have not started yet, in seconds.
        peer_timeout_seconds: how long a worker may be silent before it counts as lost, in seconds;
            a worker whose process has ended is noticed at once. Default:
            `KERAS_HET_PEER_TIMEOUT_SECONDS` in the environment, or 30.
        micro_batch_size: most samples that a replica computes on at a time, for instance the limit
            of its memory: a number for all replicas, a list with one for each replica of all
            workers, or a dict {replica: samples} for some. A larger share is computed in parts, in
            `predict` too; gradients are added up before replicas exchange them. "auto" cuts only
            shares that do not fit, as a `BatchBalancer` finds out. Default: shares are never cut.
        communication_dtype: "bfloat16" or "float16": gradients travel between workers rounded
            to that type, and are summed in their own. The numbers are then NOT one device's.
            Default: they travel as they are.
        powersgd_rank: large gradients travel between workers as matrices of that rank, and what it
            leaves out in later steps (PowerSGD). The numbers are then NOT one device's.
        on_drift: what `fit` does after an epoch if replicas differ, as unlike cards may: "warn"
            names the variable, "copy" gives all the chief's values too, "ignore" does not compare.

    Raises:
        TypeError: for devices that are not a list of names.
        ValueError: for a Keras backend other than TensorFlow, a malformed TF_CONFIG, devices
            that do not exist or are of different types, shares that do not fit the number of
            replicas, and on every worker if they were started with different settings or versions.
        RuntimeError: if a cluster is to be joined after TensorFlow has been used.
        TimeoutError: if another worker has not started within `startup_timeout_seconds`.

    Example:
        >>> import keras, keras_het
        >>> strategy = keras_het.HeterogeneousStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")

    Reference: Kim et al., "Towards an optimized distributed deep learning framework for a
    heterogeneous multi-GPU cluster", Cluster Computing 23, 2020; `tf.distribute`.
    """

    _collective_key_base = 0  # TensorFlow numbers collectives from here
    _extended_class = HeterogeneousExtended
    _compiles_steps = True  # with XLA, if that is asked for
    _holds_parts = False  # of a model in each process, as a pipeline's do

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        share_weights: Weights | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        gradient_reduction: str | Summation = "all_reduce",
        startup_timeout_seconds: float = 300.0,
        peer_timeout_seconds: float | None = None,
        micro_batch_size: MicroBatchSize = None,
        communication_dtype: str | None = None,
        powersgd_rank: int | None = None,
        on_drift: str = "warn",
    ) -> None:
        check_keras_backend(keras.backend.backend())
        check_number("startup_timeout_seconds", startup_timeout_seconds, above=0)
        patience = read_peer_timeout(peer_timeout_seconds)
        summation = read_gradient_reduction(gradient_reduction)
        how = (communication_options, communication_dtype, powersgd_rank)
        check_how_gradients_travel(*how, summation)
        check_on_drift(on_drift)
        self._collective_key_base = next_collective_key_base()
        emulated_devices = read_emulated_devices()
        self._has_warned = False
        membership = find_cluster(cluster_resolver)
        check_is_no_summation_machine(membership.config)
        names = choose_devices(devices, membership.num_workers)
        seconds_left = wait_for_workers(membership, startup_timeout_seconds)
        extended = self._extended_class(
            self,
            cluster_resolver=membership.resolver,
            communication_options=communication_options or private_api.CommunicationOptions(),
            devices=names,
            startup_timeout_seconds=seconds_left,
            peer_timeout_seconds=patience,
            on_join=lambda: _begin_watching(membership, patience),
        )
        super().__init__(extended)
        if membership.config is not None or membership.num_workers > 1:
            leave_quickly()
        extended.cluster_config, extended.on_drift = membership.config, on_drift
        extended.emulated_devices = emulated_devices
        extended.data_path = DataPath(self, weights_of_replicas(share_weights, self.layout))
        sizes = read_micro_batch_size(micro_batch_size, self.num_replicas_in_sync)
        extended.micro_batch_sizes = sizes
        extended.compute_times = ComputeTimes(self.layout, micro_batch_size == "auto")
        extended.send_gradients_as(communication_dtype)
        extended.send_low_rank(powersgd_rank)
        self._warn_of_emulation(len(self.layout.local_replicas))
        if self.num_workers > 1:
            agreement.check_agreement(extended, self.share_weights, summation, sizes, on_drift)
            agreement.share_random_seed(extended)
            watch = extended.peer_watch = extended.peer_watch or watch_peers(membership, patience)
            if summation is not None:
                from keras_het.summation.group import start_summation

                group = start_summation(summation, extended, membership, watch.raise_if_lost)
                if group is not None:
                    watch_summation(watch, group)
                extended.use_summation(group)
            atexit.register(leave_together, weakref.ref(self))
        # Ends training after a signal; Ctrl-C only where other workers have to end as well.
        is_alone = self.num_workers == 1 and not self.num_async_workers
        if not is_alone and not (membership.config and membership.config.is_evaluator):
            keras_calls.refuse_models_outside(self)
        extended.stop_request = StopRequest(self, is_alone)
        stop_signals.add(extended.stop_request)
        stop_signals.install(numbers=[signal.SIGTERM] if is_alone else SIGNALS)
        share_news(extended.peer_watch, self.worker_index, extended.stop_request)

    @property
    def extended(self) -> HeterogeneousExtended:
        """What the package's own parts share; not for users, as in all strategies of TensorFlow."""
        return super().extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers of the sync group."""
        return self.layout.num_replicas

    def __repr__(self) -> str:
        shares = ", ".join(f"{weight:g}" for weight in self.share_weights)
        return self._described(self.extended.worker_devices, f"shares [{shares}]")

    def _described(self, devices: Sequence[str], state: str) -> str:
        names = ", ".join(name.rpartition("/device:")[2] for name in devices)
        return (
            f"<{type(self).__name__}: worker {self.worker_index} of {self.num_workers}, devices "
            f"[{names}] here, {state}>"
        )

    def _warn_of_emulation(self, num_devices: int) -> None:
        warn_of_emulated_devices(self.extended.emulated_devices, num_devices)

    def _stop_watching(self) -> None:
        """Stop reporting workers that are gone; at the end of the script."""
        if self.extended.peer_watch is not None:
            self.extended.peer_watch.stop()

    @property
    def layout(self) -> ReplicaLayout:
        """Replicas of each worker (`replicas_per_worker`), and those here (`local_replicas`)."""
        return self.extended.layout

    @property
    def num_workers(self) -> int:
        """Number of workers (processes)."""
        return self.extended.layout.num_workers

    @property
    def worker_index(self) -> int:
        """This worker's index; 0 is the chief."""
        return self.extended.layout.worker_index

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes to shared paths."""
        config = self.extended.cluster_config
        return self.worker_index == 0 if config is None else config.is_chief or config.is_evaluator

    @property
    def is_async_worker(self) -> bool:
        """Whether this process trains outside of the sync group (job `async`)."""
        config = self.extended.cluster_config
        return config is not None and config.is_async_worker

    @property
    def is_parameter_server(self) -> bool:
        """Whether this process holds the parameter service of async workers and trains nothing."""
        config = self.extended.cluster_config
        return config is not None and config.is_parameter_server

    @property
    def num_async_workers(self) -> int:
        """Number of workers outside of the sync group."""
        config = self.extended.cluster_config
        return 0 if config is None else len(config.async_workers)

    @property
    def has_lost_workers(self) -> bool:
        """Whether another worker is known to have died or hung."""
        watch = self.extended.peer_watch
        return watch is not None and watch.wait_for_loss(timeout_seconds=0.0) is not None

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver, as in `MultiWorkerMirroredStrategy`."""
        return self.extended._cluster_resolver

    @property
    def share_weights(self) -> tuple[float, ...]:
        """The share weight of every replica."""
        return self.extended.data_path.weights

    def set_share_weights(self, share_weights: Weights) -> None:
        """Change the share weights from a later step on.

        Call it on every worker between the same two steps with the same weights. The data path has
        already cut the batches of the next steps (its `lookahead`: 2 or `steps_per_execution`).

        Args:
            share_weights: one non-negative weight per replica of all workers.

        Raises:
            ValueError: if the number of weights is not the number of replicas, or all are zero.
        """
        self.extended.data_path.weights = weights_of_replicas(share_weights, self.layout)

    def distribute(
        self,
        dataset: tf.data.Dataset,
        global_batch_size: int | None = None,
        *,
        batch_map: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        lookahead: int | None = None,
    ) -> GlobalOrderDataset:
        """Give every replica its share of one global order of samples.

        Args:
            dataset: dataset of single samples if `global_batch_size` is given, else of global
                batches. Every worker passes the same dataset.
            global_batch_size: number of samples of a step over all replicas.
            batch_map: row-wise function of a batch (row i of the result depends on row i only), or
                several, first to last; each worker runs them on its own rows only, which may be 0.
            lookahead: steps by which the pipeline works ahead, and by which a change of weights is
                late; by default 2, or `steps_per_execution` in `fit`.

        Returns:
            An iterable that `fit`, `evaluate`, `predict` and custom loops accept.
        """
        data_path = self.extended.data_path
        return data_path.distribute(dataset, global_batch_size, batch_map, lookahead)

    def distribute_files(
        self,
        filenames: Sequence[str],
        reader: Callable[[tf.Tensor], tf.data.Dataset],
        global_batch_size: int,
        *,
        samples_per_file: Sequence[int] | None = None,
        map_function: Callable[..., Any] | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
    ) -> FileShardedDataset:
        """Give every worker whole files in proportion to its shares; it reads no others.

        Every sample is used exactly once per epoch, but the order is not that of one device. A
        worker's number of samples differs from its ideal by at most the size of the largest file.

        Args:
            filenames: all files, in the same order on all workers.
            reader: makes a `tf.data.Dataset` of samples from a filename (string scalar).
            global_batch_size: number of samples of a step over all replicas.
            samples_per_file: samples in each file. If None, each worker reads all files once to
                count them, which is slow.
            map_function: for a single sample, run in parallel by the worker that uses it.
            shuffle_buffer: samples in the buffer in which each worker shuffles its own, 0 for none.
            seed: seed of that shuffle.

        Returns:
            An iterable that `fit`, `evaluate`, `predict` and custom loops accept.
        """
        return self.extended.data_path.distribute_files(
            filenames,
            reader,
            global_batch_size=global_batch_size,
            samples_per_file=samples_per_file,
            map_function=map_function,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        )

    def _measure_phases(self, model: keras.Model, sampled: int) -> None:
        phases = self.extended.compute_times.phases
        self.extended.data_path.on_input_wait = phases.note_input_wait
        phases.begin(model, self.extended.worker_devices, sampled)

    def _sample_steps(
        self, session: FitSession | None, earlier: SampledSteps | None = None
    ) -> SampledSteps | None:
        """Measure only some steps of a `fit`, if measuring would stop a device."""
        request = self.extended.stop_request
        if session is None or not self.extended.works_ahead:
            return None
        if request.sampled is None:
            request.sampled = SampledSteps(self, session, earlier)
            session.on_end(self._end_sampling)
        self.extended.data_path.on_input_wait = request.sampled.batch_arrives
        return request.sampled

    def _end_sampling(self) -> None:
        self.extended.stop_request.sampled = self.extended.data_path.on_input_wait = None

    @property
    def current_shares(self) -> tuple[int, ...]:
        """Samples of each replica in the latest batch, empty before the first."""
        return self.extended.data_path.current_shares

    @property
    def samples_delivered(self) -> int:
        """Samples of all batches so far, over all replicas of this group."""
        return self.extended.data_path.samples_delivered

    @property
    def local_samples_delivered(self) -> int:
        """Samples of all batches so far, over this worker's replicas."""
        return self.extended.data_path.local_samples_delivered

    def barrier(self) -> None:
        """Wait until every worker has called it, for example until the chief has saved."""
        self.extended.agree("strategy.barrier()", {}, however_late=True)

    def experimental_distribute_dataset(
        self,
        dataset: tf.data.Dataset | DistributedSteps,
        options: tf.distribute.InputOptions | None = None,
    ) -> DistributedSteps:
        """Distribute a dataset of global batches; `fit(dataset)` goes through here."""
        del options  # this strategy's data path has nothing to choose
        if isinstance(dataset, DistributedSteps):
            return dataset
        return self.distribute(dataset)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: tf.distribute.InputOptions | None = None,
    ) -> tf.distribute.DistributedDataset:
        """Distribute datasets that a function makes, as `tf.distribute.Strategy` does.

        Each replica takes the batches that the function makes, so the shares must be equal: with
        unequal ones, iterating raises a ValueError. `distribute` has no such limit.

        Args:
            dataset_fn: takes a `tf.distribute.InputContext`, returns a `tf.data.Dataset` of the
                batches of single replicas.
            options: `tf.distribute.InputOptions`.
        """
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        return with_own_batches(dataset, self)

    def run(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Nest:
        """Run `fn` on every replica.

        Keras's own steps are run exactly for uneven shares. Any other function keeps the meaning it
        has under `tf.distribute`: nothing is weighted, so call `tf.nn.compute_average_loss` in it.

        Args:
            fn: function to run in replica context.
            args: positional arguments; `DistributedValues` are unpacked per replica.
            kwargs: keyword arguments, likewise.
            options: `tf.distribute.RunOptions`.
        """
        step = private_api.undecorated_step(fn)
        kind = private_api.keras_step_kind(step) if args and not kwargs else None
        model = private_api.model_of_step(step) if kind is not None else None
        if kind is None:
            if self.extended.emulated_devices is not None and not self._has_warned:
                self._has_warned = True
                warn_that_nothing_waits()
        else:
            self.extended.stop_request.note_step(
                private_api.model_of_prediction(step),
                f"{kind}_function",
                self.extended.steps_carry_flags,
            )
        is_traced_apart = hasattr(fn, "get_concrete_function")
        if kind is None and len(self.layout.local_replicas) > 1 and not is_traced_apart:
            with keras_hooks():
                return super().run(own_function(fn), args=args, kwargs=kwargs, options=options)
        if kind is None or not self._needs_exact_step(model):
            fn = fn if kind is None else compiled_as_a_whole(fn, model)
            return super().run(fn, args=args, kwargs=kwargs, options=options)
        run = functools.partial(super().run, options=options)
        if kind == "predict":
            return run_predict_step(self, run, step, args[0])
        return run_train_or_test_step(self, run, kind, step, args[0])

    def _complete(self, model: keras.Model, purpose: str) -> None:
        """Give every process the whole model, where a single one might ask for it."""

    def _put_together(self, model: keras.Model) -> None:
        """Give every process the whole model; all of them must call it after the same step."""

    def _needs_exact_step(self, model: keras.Model | None) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return (
            self.num_replicas_in_sync > 1
            or self.is_async_worker
            or self.extended.emulated_devices is not None
            or self.extended.steps_are_timed
            or self.extended.micro_batch_sizes is not None
            # its `cond` must not merge replicas, not even one
            or isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        )

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Nest, axis: int | None
    ) -> Nest:
        """Reduce `value` over all replicas, as `tf.distribute.Strategy.reduce`.

        Keras asks for the mean over whole batches of unequal size only to learn the shapes of a
        batch. It gets the type of the global batch (`tf.TensorSpec`) instead: a replica's part may
        have no rows, and workers must not infer different metrics.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: value with one component per replica.
            axis: dimension to reduce within each component too, or None.
        """
        is_mean = reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN") and not tf.inside_function()
        leaves = tf.nest.flatten(value)
        if is_mean and axis is None and any(isinstance(leaf, UnevenPerReplica) for leaf in leaves):
            return tf.nest.map_structure(lambda leaf: getattr(leaf, "global_spec", leaf), value)
        return super().reduce(reduce_op, value, axis)


def _begin_watching(membership: Membership, patience_seconds: float) -> PeerWatch:
    stop_signals.install(private_api.abort_collectives)
    watch = watch_peers(membership, patience_seconds)
    install_report(watch)
    return watch
