"""This process's place in the cluster: the workers, and the devices it uses."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_het import private_api
from keras_het.planning.argument_checks import expect
from keras_het.strategy.cluster.arrival import wait_for_peers
from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config
from keras_het.strategy.cluster.peer_watch import PeerWatch, neighbours, short_name
from keras_het.strategy.cluster.stop_request import StopRequest
from keras_het.strategy.cluster.stop_signals import stop_signals

if TYPE_CHECKING:
    from keras_het.summation.group import SummationGroup

_KEYS_PER_STRATEGY = 100_000
_strategies = itertools.count()
# Joining takes as long as TensorFlow needs to set up the devices.
_SHORTEST_WAIT = 60.0
_LOST_WORKER = "keras_het/lost_worker"
_CANNOT_WAIT = "SIGTERM and does not wait for the next step"
_logger = logging.getLogger(__name__)


def next_collective_key_base() -> int:
    """Return the first collective key of a new strategy."""
    # Workers create their strategies in the same order, so they agree on it.
    return _KEYS_PER_STRATEGY * next(_strategies)


@dataclass(frozen=True)
class Membership:
    """The workers that train together, and this process's place among them."""

    resolver: tf.distribute.cluster_resolver.ClusterResolver
    workers: Mapping[str, str]
    num_workers: int
    config: ClusterConfig | None = None
    own_task: str | None = None

    @property
    def peers(self) -> dict[str, str]:
        """Task name to address of every other worker."""
        return {task: at for task, at in self.workers.items() if task != self.own_task}


def find_cluster(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
) -> Membership:
    config = None
    is_resolver = cluster_resolver is None or hasattr(cluster_resolver, "cluster_spec")
    expected = "a tf.distribute.cluster_resolver.ClusterResolver"
    expect(is_resolver, expected, cluster_resolver=cluster_resolver)
    if cluster_resolver is None:
        config = read_cluster_config()
        _check_runs_a_script(config)
        if config is None or config.num_workers == 1:
            # A lone worker needs no server and no collectives.
            return Membership(_single_worker_resolver(), {}, 1, config)
        cluster_resolver = _sync_group_resolver(config)
    spec = cluster_resolver.cluster_spec()
    workers = {
        f"/job:{job}/replica:0/task:{index}": spec.task_address(job, index)
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    }
    own_task = f"/job:{cluster_resolver.task_type}/replica:0/task:{cluster_resolver.task_id}"
    if own_task not in workers or len(workers) == 1:
        return Membership(_single_worker_resolver(), {}, 1)
    return Membership(cluster_resolver, workers, len(workers), config, own_task)


def _check_runs_a_script(config: ClusterConfig | None) -> None:
    if config is not None and config.is_serving_only:
        raise RuntimeError(
            "TF_CONFIG gives this process a part of the parameter service. Received: "
            f"{config.task_name}. It needs no script: run `keras-het parameter-server` here, with "
            "the same TF_CONFIG and secret."
        )


def _sync_group_resolver(config: ClusterConfig) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Return a resolver of the workers with collectives; TensorFlow must not wait for others."""
    outsiders = (config.async_workers, config.parameter_services, config.summation_machines)
    if not any(outsiders):
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    jobs = config.as_cluster_dict()
    spec = tf.train.ClusterSpec({job: jobs[job] for job in ("chief", "worker") if job in jobs})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=config.task_type, task_id=config.task_index, rpc_layer=config.rpc_layer
    )


def _single_worker_resolver() -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))


def choose_devices(devices: Sequence[str] | None, num_workers: int) -> tuple[str, ...]:
    """Return the names of the local devices to use, such as ("GPU:0", "GPU:1")."""
    if devices is None:
        return _default_devices(num_workers)
    is_name, is_list = isinstance(devices, str), isinstance(devices, Iterable)
    if is_name or not is_list or not all(isinstance(device, str) for device in devices):
        fix = f"devices=[{devices!r}]" if is_name else f"share_weights={devices!r}"
        raise TypeError(
            '`devices` must be a list of names such as ["GPU:0", "GPU:1"]; numbers, one for each '
            f"replica, are `share_weights`. Received: devices={devices!r}. Did you mean {fix}?"
        )
    names = tuple(_short_name(device) for device in devices)
    types = {name.split(":")[0] for name in names}
    if len(types) != 1 or len(set(names)) != len(names):
        raise ValueError(
            "`devices` must name one device or more, each once and all of one type: a collective "
            f"group has one type of device. Received: {list(devices)}. Use the GPUs or the "
            "CPUs of a machine, not both."
        )
    available = _available(types.pop())
    missing = [name for name in names if name not in available]
    if missing:
        raise ValueError(
            f"`devices` names devices that this process does not have. Received: {missing}; "
            f"available: {list(available)}. Logical CPUs are made with "
            "tf.config.set_logical_device_configuration before TensorFlow is used."
        )
    return names


def _default_devices(num_workers: int) -> tuple[str, ...]:
    gpus = _available("GPU")
    if gpus:
        return gpus
    cpus = _available("CPU")
    return cpus[:1] if num_workers > 1 else cpus


def _available(device_type: str) -> tuple[str, ...]:
    """Names of the devices of one type; does not initialise TensorFlow before a cluster exists."""
    return tuple(f"{device_type}:{index}" for index in range(len(physical_devices(device_type))))


def physical_devices(device_type: str) -> list[tf.config.PhysicalDevice]:
    """Return for each logical device of a type the physical device that it is a part of."""
    found = []
    for device in tf.config.get_visible_devices(device_type):
        parts = tf.config.get_logical_device_configuration(device)
        found += [device] * (len(parts) if parts else 1)
    return found


def _short_name(device: str) -> str:
    """Turn "/gpu:0", "/device:GPU:0" or "gpu:0" into "GPU:0"."""
    parts = device.strip("/").removeprefix("device:").split("/")[-1].removeprefix("device:")
    device_type, _, index = parts.partition(":")
    return f"{device_type.upper()}:{index or 0}"


def wait_for_workers(membership: Membership, startup_timeout_seconds: float) -> float:
    if membership.own_task is None:
        return startup_timeout_seconds
    if private_api.is_too_late_to_join():
        raise RuntimeError(
            "A process joins its cluster before it does anything else with TensorFlow. Received: "
            "a HeterogeneousStrategy of several workers after TensorFlow had been used. Create "
            "the strategy at the start of the script, before any tensor, variable or model."
        )
    peers = {short_name(task): address for task, address in membership.peers.items()}
    own_address = membership.workers[membership.own_task]
    # a further strategy of the process: TensorFlow itself listens since the first
    listens = not private_api.listens_for_workers()
    left = wait_for_peers(own_address, peers, startup_timeout_seconds, listens=listens)
    return max(_SHORTEST_WAIT, left) if listens else left


def watch_peers(membership: Membership, patience_seconds: float) -> PeerWatch:
    tasks = list(membership.workers.items())
    place = [task for task, _ in tasks].index(membership.own_task or "")
    peers = dict(tasks[other] for other in neighbours(place, len(tasks)))
    watch = PeerWatch(
        peers, private_api.peer_is_healthy, private_api.abort_collectives, patience_seconds
    )
    watch.start()
    return watch


def check_is_no_summation_machine(config: ClusterConfig | None) -> None:
    """Refuse to train on a machine reserved for summing gradients."""
    if config is not None and config.is_summation_machine:
        raise RuntimeError(
            'TF_CONFIG gives this process the job "summation": it sums gradients of the workers '
            "and does not train. Run `keras-het summation-server` here instead of the "
            "training script."
        )


def watch_summation(watch: PeerWatch, summation: SummationGroup) -> None:
    watch.watch_too(
        summation.spare_machines, summation.is_healthy, lambda message: summation.abort()
    )


def share_news(watch: PeerWatch | None, own_index: int, request: StopRequest) -> None:
    """Let all workers hear at once who is lost or cannot wait; call it when all have joined."""

    def tell(message: str) -> None:
        private_api.tell_cluster(_LOST_WORKER, message)

    def is_asked_to_end(message: str) -> bool:
        if not message.startswith(_CANNOT_WAIT) or not stop_signals.is_ours(signal.SIGTERM):
            return False
        if not stop_signals.has_received_sigterm:
            stop_signals.end_now(time.monotonic(), f"Another worker has received {message}")
        return True

    if watch is None:
        return
    request.tell = lambda: tell(f"{_CANNOT_WAIT} (worker {own_index}): all workers end here.")
    watch.share_news(tell, lambda: private_api.wait_for_cluster(_LOST_WORKER), is_asked_to_end)
