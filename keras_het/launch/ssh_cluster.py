"""A cluster of workers on other machines, started by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_het.launch.cluster_environment import Place
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_environment import (
    choose_gpus,
    environment_of,
    present_gpus,
    tf_config_of,
)
from keras_het.strategy.cluster.cluster_config import SERVICE_ADDRESS

# BatchMode: nobody is there to type a password. ServerAlive: a lost host is noticed in 45 s.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
_PASSED = ("KERAS_", "NCCL_", "TF_", "XLA_", "PYTHONUNBUFFERED")


class SshCluster(LocalCluster):
    """The same command as several workers, each on its host and in this directory there."""

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[str],
        port: int,
        each_has_gpu: bool,
        env: dict[str, str],
        **options: Any,
    ) -> None:
        self.hosts = tuple(hosts)
        self._places = Place(self.hosts, 0, "--hosts").addresses(port)
        self._each_has_gpu = each_has_gpu
        # the parameter service is beside the first worker, not on this machine
        address = os.environ.get(SERVICE_ADDRESS, f"{hosts[0]}:{port + 1}")
        own = {SERVICE_ADDRESS: address, "PYTHONUNBUFFERED": "1", **env}
        no_gpus_of_ours: list[dict[str, str]] = [{} for _ in hosts]
        super().__init__(
            command, len(hosts), env=own, worker_env=no_gpus_of_ours, pin=False, **options
        )

    def _start_worker(self, index: int) -> None:
        inherited = self._inherited_environment(index)
        environment = {name: inherited[name] for name in inherited if name.startswith(_PASSED)}
        environment["TF_CONFIG"] = tf_config_of(index, self._places, self.num_async_workers)
        gpu = self.hosts[:index].count(self.hosts[index]) if self._each_has_gpu else None
        program = [self._command[0], "-m", "keras_het.launch.ssh_cluster", *self._command]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(program)}"
        opening = json.dumps({"environment": environment, "gpu": gpu})
        self._add(index, [*_SSH, self.hosts[index], remote], os.environ, opening=opening)


_SECONDS_TO_OBEY = 10.0


def main() -> int:
    opening = json.loads(sys.stdin.readline())
    environment = {**os.environ, **opening["environment"]}
    if opening["gpu"] is not None:
        environment |= environment_of(choose_gpus(f"{opening['gpu']},", present_gpus())[0])
    worker = subprocess.Popen(
        sys.argv[1:], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=_obey, args=(worker,), daemon=True).start()
    code = worker.wait()
    _send(worker, signal.SIGKILL)  # to what it has left
    return code if code >= 0 else 128 - code


def _obey(worker: subprocess.Popen[bytes]) -> None:
    for line in sys.stdin:
        _send(worker, int(line))
    _send(worker, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(_SECONDS_TO_OBEY)
    _send(worker, signal.SIGKILL)


def _send(worker: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


if __name__ == "__main__":
    sys.exit(main())
