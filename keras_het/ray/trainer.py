"""Ray Train's trainer for unlike workers that come and go."""

from __future__ import annotations

import dataclasses
import math
import os
import runpy
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray._private.state import state
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.tensorflow import TensorflowTrainer
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

from keras_het.fit.backup_folder import remove_memory_folders
from keras_het.ignored_errors import ignore_errors
from keras_het.planning.argument_checks import check_number, expect
from keras_het.ray.cluster import ClusterConfig, shorten_log
from keras_het.ray.group import (
    Losses,
    MaxFailuresExceededError,
    StopTogether,
    TrainFunctionError,
    on_every_node,
    start_progress,
)

_SECONDS_TO_ANSWER = 2.0


class PresentNodes(ElasticScalingPolicy):
    """Ray Train's policy, without nodes that are gone or about to leave."""

    # What Ray has reserved may be 20 seconds old: a group that asks for a lost node waits in vain.

    def _count_possible_workers(self, reserved_resources: dict[str, Any]) -> int:
        leaving = state.get_draining_nodes()
        present = {each["NodeID"] for each in ray.nodes() if _answers(each)} - set(leaving)
        return super()._count_possible_workers(
            {node: held for node, held in reserved_resources.items() if node in present}
        )


def _answers(node: dict[str, Any]) -> bool:
    """Whether a node listens; Ray takes some 15 seconds to notice that one is gone."""
    if not node["Alive"]:
        return False
    try:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, _SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True


# By default Ray looks after its workers every 2 seconds, and after machines that leave every 5. It
# waits 60 for a machine that is lost while a group starts.
_SECONDS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}
_UNLIMITED = -1
_MOST_LOSSES = 3


def _check_range(num_workers: int | tuple[int, int]) -> None:
    counts = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    are_two = len(counts) == 2 and all(isinstance(count, int) for count in counts)
    is_range = are_two and 1 <= counts[0] <= counts[1]
    expected = "1 or more, or the least and the most, such as (2, 4)"
    expect(is_range, expected, num_workers=num_workers)


class KerasTrainer(TensorflowTrainer):
    """`ray.train.tensorflow.TensorflowTrainer` for workers that differ, come and go.

    Each worker calls the training function, which makes a `HeterogeneousStrategy` and trains with
    `callbacks=[keras_het.callbacks.ElasticBackup(backup_dir)]`. When a worker is lost, or machines
    join, Ray starts another group of workers, and the training continues at the step after the
    newest backup: with the same global batch in other shares, and each sample used once.

    An error of the training function ends the training at once, and is raised here.

    Args:
        train_loop_per_worker: called on each worker, without argument or with `train_loop_config`.
        num_workers: number of workers, or the least and the most.
        resources_per_worker: what Ray reserves for each worker, in Ray's units. With "GPU" in it
            each worker has a GPU. Without, a worker takes the GPU that has its place among the
            workers of its node, and the CPU where there are no more: for GPU and CPU nodes at once
            start each with `ray start --resources='{"het": N}'` for N workers, and give
            {"het": 1}. By default one CPU.
        grace_seconds: the longest time that a group may take to save before a larger one starts.
        resize_interval_seconds: how often to look for machines that have joined.
        run_config: of Ray Train. `failure_config.max_failures` limits the losses in a row without
            progress in between: 3 in place of Ray's default 0, any number with -1.
        scaling_config: of Ray Train, in place of `num_workers` and `resources_per_worker`.
        **kwargs: further arguments of `TensorflowTrainer`.

    Raises:
        ValueError: if both `scaling_config` and what it would hold are given.
        TrainFunctionError: by `fit`, if the training function fails.
        MaxFailuresExceededError: by `fit`, if workers are lost again and again without progress.

    Reference: https://docs.ray.io/en/latest/train/user-guides/elastic-training.html
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        num_workers: int | tuple[int, int] | None = None,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        grace_seconds: float = 30.0,
        resize_interval_seconds: float = 10.0,
        run_config: RunConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        **kwargs: Any,
    ) -> None:
        expect(
            callable(train_loop_per_worker),
            "a function",
            train_loop_per_worker=train_loop_per_worker,
        )
        check_number("grace_seconds", grace_seconds, least=0)
        check_number("resize_interval_seconds", resize_interval_seconds, above=0)
        resources = {"CPU": 1} if resources_per_worker is None else resources_per_worker
        expect(isinstance(resources, Mapping), "a dict", resources_per_worker=resources)
        for name, value, kind in (
            ("run_config", run_config, RunConfig),
            ("scaling_config", scaling_config, ScalingConfig),
        ):
            is_right = value is None or isinstance(value, kind)
            expect(is_right, f"a ray.train.{kind.__name__}", **{name: value})
        if num_workers is not None:
            _check_range(num_workers)
        if (scaling_config is None) == (num_workers is None):
            raise ValueError(
                "Give either `num_workers` or `scaling_config`. Received: "
                f"num_workers={num_workers}, scaling_config={scaling_config}. Expected for example "
                "num_workers=(2, 4)."
            )
        scaling = scaling_config or ScalingConfig(
            num_workers=num_workers,
            resources_per_worker=dict(resources or {"CPU": 1}),
            elastic_resize_monitor_interval_s=resize_interval_seconds,
        )
        given = run_config or RunConfig()
        failures = given.failure_config or FailureConfig()
        most = failures.max_failures or _MOST_LOSSES
        self._most_losses = math.inf if most == _UNLIMITED else most
        self._grace_seconds = grace_seconds
        threads = int((scaling.resources_per_worker or {}).get("CPU", 0)) or None
        super().__init__(
            train_loop_per_worker,
            tensorflow_config=ClusterConfig(threads),
            scaling_config=scaling,
            run_config=dataclasses.replace(
                given,
                failure_config=dataclasses.replace(failures, max_failures=_UNLIMITED),
            ),
            **kwargs,
        )

    def fit(self) -> Result:
        """Train, with as many groups of workers as it takes."""
        for name, seconds in _SECONDS.items():
            os.environ.setdefault(name, seconds)
        if not ray.is_initialized():
            ray.init()
        shorten_log()
        progress = start_progress()
        self.backend_config.progress = progress
        self.backend_config.run = run = uuid.uuid4().hex
        given = self.run_config.callbacks or []
        self.run_config.callbacks = [*given, StopTogether(self._grace_seconds)]
        try:
            return super().fit()
        except WorkerGroupError as error:
            raise self._cause(error) from None
        finally:
            self.run_config.callbacks = given
            with ignore_errors("tidying up"):  # the cluster may be gone
                ray.kill(progress)
                on_every_node(remove_memory_folders, run)

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        policy = Losses(
            self.run_config.failure_config, self._most_losses, self.backend_config.progress
        )
        arguments["failure_policy"] = policy
        if self.scaling_config.elasticity_enabled:
            arguments["scaling_policy"] = PresentNodes(self.scaling_config)
        return super()._initialize_and_run_controller(**arguments)

    def _cause(self, error: WorkerGroupError) -> Exception:
        failures = sorted(error.worker_failures.items())
        for _, failure in failures:
            if isinstance(failure, TrainFunctionError):
                return failure
        rank, failure = failures[0]
        return MaxFailuresExceededError(
            f"Workers were lost {self._most_losses + 1} times in a row, and no backup got further "
            f"in between. Received the last time, from worker {rank}: {failure}. See that worker's "
            "output; callbacks=[keras_het.callbacks.ElasticBackup(backup_dir)] writes backups."
        )


def run_on_ray(
    target: Sequence[str],
    num_workers: int | tuple[int, int],
    address: str,
    resources_per_worker: Mapping[str, float] | None,
) -> None:
    """Run a script, or a module after "-m", with its arguments on workers of Ray."""
    ray.init(address=address, log_to_driver=True)
    script, *arguments = target
    is_module = script == "-m"
    config = {
        "name": arguments[0] if is_module else str(Path(script).absolute()),
        "arguments": arguments[is_module:],
        "source": None if is_module else Path(script).read_bytes(),
    }
    KerasTrainer(
        run_script,
        num_workers,
        resources_per_worker=resources_per_worker,
        train_loop_config=config,
    ).fit()


def run_script(config: Mapping[str, Any]) -> None:
    """Run the script on a worker; from a copy where the machine has no such file."""
    name, source = config["name"], config["source"]
    sys.argv = [name, *config["arguments"]]
    if source is None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = Path(name)
    sys.path.insert(0, str(path.parent))
    if not path.exists() or path.read_bytes() != source:
        path = Path(tempfile.mkdtemp(prefix="keras_het-")) / path.name
        path.write_bytes(source)
    runpy.run_path(str(path), run_name="__main__")
