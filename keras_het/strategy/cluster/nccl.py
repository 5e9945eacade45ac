"""NCCL: which GPUs sum by it, and whether it answers.

NCCL may wait for ever, for an interface that does not reach the others or between cards that it
cannot join, and TensorFlow cannot continue in that process. So the first sum between workers has a
time limit, and unlike cards of one process are tried in another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil
import tensorflow as tf

from keras_het import private_api
from keras_het.device_names import identities

_logger = logging.getLogger(__name__)

INTERFACE = "NCCL_SOCKET_IFNAME"
SECONDS = 60.0
"""The first sum sets up connections to all GPUs, which takes some seconds."""
Implementation: TypeAlias = tf.distribute.experimental.CommunicationImplementation


def is_wanted(device_type: str, options: private_api.CommunicationOptions) -> bool:
    """Whether workers with such devices sum by NCCL, if the others want it too."""
    if device_type.upper() != "GPU" or options.implementation == Implementation.RING:
        return False
    return bool(tf.sysconfig.get_build_info().get("is_cuda_build"))


def with_implementation(
    options: private_api.CommunicationOptions, implementation: Implementation
) -> private_api.CommunicationOptions:
    """Return the same options with NCCL, or with a ring."""
    return private_api.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=implementation,
    )


def share_a_gpu(devices: Sequence[str], gather: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether two of all workers' devices are one GPU, or parts of one: NCCL refuses them."""
    names = [each.encode() for each in identities(devices)]
    own = [int(hashlib.sha256(name).hexdigest()[:15], 16) for name in names]
    everyone = gather(np.array(own, np.int64)).tolist()
    return len(set(everyone)) < len(everyone)


def choose_interface(address: str) -> None:
    """Let NCCL use the network interface that has this worker's address."""
    # NCCL takes the first one that it finds, which may be a bridge of containers or a VPN.
    if INTERFACE in os.environ:
        return
    try:
        own = socket.gethostbyname(address.rpartition(":")[0].strip("[]"))
    except OSError:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if not own.startswith("127.") and any(each.address == own for each in addresses):
            os.environ[INTERFACE] = name


def check_answers(
    first_sum: Callable[[], object], end: Callable[[str], None], seconds: float = SECONDS
) -> None:
    """Let all workers sum once by NCCL; end with one error if that does not work."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            first_sum()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="keras_het-first-nccl-sum", daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive() and not failures:
        return
    interface = os.environ.get(INTERFACE, "the first one that it finds")
    said = str(failures[0]).splitlines()[0][:300] if failures else f"no answer within {seconds:g} s"
    message = (
        f"NCCL does not sum between the GPUs of the workers. Received: {said}; NCCL uses the "
        f"network interface {interface}. Set {INTERFACE} to one that reaches the other machines "
        "(`ip address` shows them), run `keras-het doctor` on all machines, and NCCL_DEBUG=INFO "
        "says more. Some unlike cards cannot be joined. Without NCCL: HeterogeneousStrategy("
        "communication_options=tf.distribute.experimental.CommunicationOptions(implementation="
        "tf.distribute.experimental.CommunicationImplementation.RING))."
    )
    if not failures:
        end(message)
    raise RuntimeError(message) from (failures[0] if failures else None)


def joins(devices: Sequence[str], seconds: float = SECONDS) -> bool:
    """Whether NCCL sums between unlike GPUs of this process; tried once, in another process."""
    # A failure for another reason, such as memory that this process holds, is not remembered.
    found = "-".join([tf.__version__, *identities(devices)])
    remembered = _cache() / f"nccl-{hashlib.sha256(found.encode()).hexdigest()[:16]}.json"
    try:
        does_join = bool(json.loads(remembered.read_text()))
    except (OSError, ValueError):
        pass
    else:
        if not does_join:
            _logger.warning(
                "NCCL did not sum between these GPUs when it was tried: values are copied to the "
                "first one. Delete %s to try again.",
                remembered,
            )
        return does_join
    _logger.warning("Trying NCCL between %s, once for these GPUs.", ", ".join(devices))
    command = [sys.executable, "-m", "keras_het.strategy.cluster.nccl", *devices]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    try:
        output = subprocess.run(
            command, env=environment, capture_output=True, timeout=seconds, check=False, text=True
        )
        does_join, why = output.returncode == 0, output.stderr.strip().splitlines()[-1:]
        is_known = does_join or "nccl" in output.stderr.lower()
    except subprocess.TimeoutExpired:
        does_join, is_known, why = False, True, [f"no answer within {seconds:g} s"]
    if not does_join:
        _logger.warning(
            "NCCL does not sum between these GPUs (%s): values are copied to the first one.%s",
            *(why or ["no reason given"]),
            ""
            if is_known
            else " It is tried again at the next start; if memory was short, set "
            "TF_FORCE_GPU_ALLOW_GROWTH=true.",
        )
    if not is_known:
        return False
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(json.dumps(does_join))
    except OSError:
        pass
    return does_join


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "keras_het"


def sum_between(devices: list[str]) -> float:
    """Sum 1 on every device; return what the first one has."""
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.NcclAllReduce(num_packs=1)
    )

    @tf.function
    def total() -> tf.Tensor:
        def one() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([1024]))

        return strategy.experimental_local_results(strategy.run(one))[0][0]

    return float(total())


if __name__ == "__main__":
    received = sum_between(sys.argv[1:])
    if received != len(sys.argv) - 1:
        sys.exit(f"Received: the sum {received} of {len(sys.argv) - 1} ones.")
