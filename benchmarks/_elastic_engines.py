"""How the workers of benchmarks/elastic.py are started, disturbed, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What a cloud gives a machine that it takes away.
NOTICE_SECONDS = 30.0
# Several nodes start slowly on few cores; and Ray's workers would give way to any other program.
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TRAINING = Path(__file__).with_name("_elastic_training.py")


class OnRay:
    """A node of Ray for each worker, all on this machine, and Ray Train.

    Args:
        config: of the training function.
        is_peer: whether it is Ray's own trainer, with TensorFlow's strategy.
    """

    def __init__(self, config: dict[str, Any], is_peer: bool) -> None:
        os.environ.update(SETTINGS)
        import ray
        from ray.cluster_utils import Cluster

        self._config, self._is_peer = config, is_peer
        self._trainer: Any = None
        self._about = {"num_cpus": 4, "resources": {"het": 1}, "object_store_memory": 80 * 2**20}
        head = {**self._about, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add() for _ in range(config["num_workers"] - 1)]
        ray.init(address=self._cluster.address, logging_level="WARNING", log_to_driver=False)
        threading.Thread(target=self._train, daemon=True).start()

    def preempt(self) -> None:
        """Announce that a node leaves, and take it away when its time is over."""
        from ray._private import worker
        from ray.core.generated import autoscaler_pb2

        node = self._nodes.pop()
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline = int((time.time() + NOTICE_SECONDS) * 1000)
        worker.global_worker.gcs_client.drain_node(node.node_id, reason, "preempted", deadline)
        timer = threading.Timer(NOTICE_SECONDS, self._cluster.remove_node, (node, False))
        timer.daemon = True
        timer.start()

    def join(self) -> None:
        self._nodes.append(self._add())

    def stop(self) -> None:
        """End all of Ray's processes; `Cluster.shutdown` refuses while a trainer is connected."""
        from keras_het.fit.backup_folder import remove_memory_folders

        for node in self._cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        if not self._is_peer and self._trainer is not None:
            remove_memory_folders(self._trainer.backend_config.run)

    def _add(self) -> Any:
        return self._cluster.add_node(**self._about)

    def _train(self) -> None:
        from _elastic_training import train, train_mirrored
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer

        import keras_het.ray

        storage = str(Path(self._config["folder"]) / "ray")
        workers, each = (1, self._config["num_workers"]), {"het": 1}
        if self._is_peer:
            failures = FailureConfig(max_failures=-1)
            TensorflowTrainer(
                train_mirrored,
                train_loop_config=self._config,
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=each),
                run_config=RunConfig(storage_path=storage, failure_config=failures),
            ).fit()
        else:
            self._trainer = keras_het.ray.KerasTrainer(
                train,
                workers,
                resources_per_worker=each,
                train_loop_config=self._config,
                run_config=RunConfig(storage_path=storage),
            )
            self._trainer.fit()


class ByHand:
    """`keras-het run`, which a script starts again at once when it has ended.

    Args:
        config: of the training function.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._num_workers, self._is_over = config, config["num_workers"], False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._start_again_and_again)
        self._thread.start()

    def preempt(self) -> None:
        self._change(-1)

    def join(self) -> None:
        self._change(1)

    def stop(self) -> None:
        self._is_over = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
        self._thread.join()

    def _change(self, by: int) -> None:
        self._num_workers += by
        if self._process is not None:
            self._process.terminate()  # all save and end

    def _start_again_and_again(self) -> None:
        while not self._is_over:
            count = str(self._num_workers)
            command = [sys.executable, "-m", "keras_het", "run", "--workers", count, str(TRAINING)]
            self._process = subprocess.Popen([*command, json.dumps(self._config)])
            self._process.wait()


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "keras_het.ray": lambda config: OnRay(config, is_peer=False),
    "Ray Train": lambda config: OnRay(config, is_peer=True),
    "restart by hand": ByHand,
}
