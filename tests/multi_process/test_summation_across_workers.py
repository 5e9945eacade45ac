"""Gradients summed by all machines give the weights of one device; a lost machine is named."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked_workers import cluster_environments
from runs import Runs

from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES

SECRET = {"KERAS_HET_SERVICE_SECRET": "of these tests, not secret"}
# How long a machine may be silent here; the default is half a minute.
PATIENCE = {"KERAS_HET_PEER_TIMEOUT_SECONDS": "3"}
# Of float32 values: small enough that every machine gets several partitions.
SETTINGS = {"partition_bytes": 16, "partitions_in_flight": 2}
CHECKS = (
    "shares_and_partial_batch",
    "zero_share",
    "batch_normalization",
    "sample_weights_and_masks",
    "shares_change_within_the_epoch",
    "loss_scale_optimizer",
    "gradient_accumulation_and_clipping",
    "custom_training_loop",
)
QUICK = (
    "shares_and_partial_batch",
    "zero_share",
    "shares_change_within_the_epoch",
    "gradient_accumulation_and_clipping",
)
# One call that times out, and the answer of the watch by then; not a speed of this machine.
LONGEST_SECONDS = 18.0
# Of workers with several devices: what their replicas reduce among each other first.
CHECKS_OF_DEVICES = (
    "shares_and_partial_batch",
    "zero_share",
    "loss_scale_optimizer",
    "gradient_accumulation_and_clipping",
    "custom_training_loop",
)
CHECKS_OF_PARAMETER_SERVERS = (
    "shares_and_partial_batch",
    "zero_share",
    "gradient_accumulation_and_clipping",
)
FOR_EVER = 10_000_000
pytestmark = pytest.mark.timeout(600)


class SummationRuns(Runs):
    """Workers and spare machines, and one device."""

    def __init__(
        self,
        start: Any,
        folder: Path,
        num_spare: int,
        devices: str,
        checks: tuple[str, ...] = CHECKS,
        **more: Any,
    ) -> None:
        num_workers = len(devices.split(","))
        self._folder = folder
        self._num_workers = num_workers
        self.checks = checks
        self.single = start(
            "program_exactness.py", None, [folder, "exactness_checks", "0", *checks]
        )
        jobs = {"worker": num_workers, "summation": num_spare}
        jobs = {job: count for job, count in jobs.items() if count}
        settings = json.dumps({**SETTINGS, **more})
        self.workers = start(
            "program_summation.py",
            None,
            [folder, "exactness_checks", devices, settings, *checks],
            environments=cluster_environments(jobs, SECRET),
        )
        self.single.wait()
        self.results = [self.workers.wait_for(index) for index in range(num_workers)]

    def num_partitions(self) -> list[int]:
        """Partitions that each machine has summed, as the first worker says."""
        lines = [line for line in self.results[0].output.splitlines() if "partitions" in line]
        assert lines, self.workers.tails()
        return json.loads(lines[-1].split(maxsplit=1)[1])


@pytest.fixture(scope="module")
def with_a_spare_machine(
    start_for_session: Any, tmp_path_factory: Any, pytestconfig: pytest.Config
) -> SummationRuns:
    """Three workers on unequal links, and one spare machine."""
    folder = tmp_path_factory.mktemp("with_a_spare_machine")
    rates = {"link_rates": [1.2, 1.0, 1.1], "spare_link_rates": [0.9]}
    checks = QUICK if pytestconfig.getoption("--quick") else CHECKS
    return SummationRuns(start_for_session, folder, 1, "1,1,1", checks, **rates)


@pytest.fixture(scope="module")
def without_spare_machines(start_for_session: Any, tmp_path_factory: Any) -> SummationRuns:
    """Three workers, which sum everything themselves."""
    folder = tmp_path_factory.mktemp("without_spare_machines")
    return SummationRuns(start_for_session, folder, 0, "1,1,1")


@pytest.fixture(scope="module")
def with_a_spare_machine_for_each(start_for_session: Any, tmp_path_factory: Any) -> SummationRuns:
    """Two workers with two devices and one, and as many machines, which sum everything."""
    folder = tmp_path_factory.mktemp("with_a_spare_machine_for_each")
    return SummationRuns(start_for_session, folder, 2, "2,1", CHECKS_OF_PARAMETER_SERVERS)


@pytest.fixture(scope="module")
def with_unequal_devices(start_for_session: Any, tmp_path_factory: Any) -> SummationRuns:
    """Two workers with two devices and one, and one spare machine."""
    folder = tmp_path_factory.mktemp("with_unequal_devices")
    return SummationRuns(start_for_session, folder, 1, "2,1", CHECKS_OF_DEVICES)


@pytest.fixture(scope="module")
def with_two_devices_each(start_for_session: Any, tmp_path_factory: Any) -> SummationRuns:
    """Two workers with two devices each."""
    folder = tmp_path_factory.mktemp("with_two_devices_each")
    return SummationRuns(start_for_session, folder, 0, "2,2", CHECKS_OF_DEVICES)


CLUSTERS = [
    "with_a_spare_machine",
    pytest.param("without_spare_machines", marks=pytest.mark.full),
    pytest.param("with_unequal_devices", marks=pytest.mark.full),
    pytest.param("with_two_devices_each", marks=pytest.mark.full),
]


@pytest.mark.quick(*(f"with_a_spare_machine-{check}" for check in QUICK))
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("cluster", CLUSTERS[:2])
def test_equals_one_device(cluster: str, check: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cluster).assert_as_one_device(check)


@pytest.mark.parametrize("check", CHECKS_OF_DEVICES)
@pytest.mark.parametrize("cluster", CLUSTERS[2:])
def test_workers_with_several_devices_equal_one_device(
    cluster: str, check: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(cluster).assert_as_one_device(check)


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS_OF_PARAMETER_SERVERS)
def test_parameter_servers_equal_one_device(
    with_a_spare_machine_for_each: SummationRuns, check: str
) -> None:
    with_a_spare_machine_for_each.assert_as_one_device(check)


@pytest.mark.full
def test_workers_beside_as_many_machines_sum_nothing(
    with_a_spare_machine_for_each: SummationRuns,
) -> None:
    runs = with_a_spare_machine_for_each
    assert runs.num_partitions()[:2] == [0, 0]
    assert min(runs.num_partitions()[2:]) > len(runs.checks)
    assert all(result.exit_code == 0 for result in runs.results), runs.workers.tails()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_machine_sums(cluster: str, request: pytest.FixtureRequest) -> None:
    runs = request.getfixturevalue(cluster)
    assert min(runs.num_partitions()) > len(runs.checks)
    assert all(result.exit_code == 0 for result in runs.results), runs.workers.tails()


LOSSES = [
    pytest.param(signal.SIGKILL, 3, {"worker": 2, "summation": 2}, "summation 1", id="killed"),
    pytest.param(signal.SIGSTOP, 3, {"worker": 2, "summation": 2}, "summation 1", id="stopped"),
    pytest.param(signal.SIGKILL, 2, {"worker": 3, "summation": 1}, "worker 2", id="worker-killed"),
]


@pytest.mark.quick("killed")
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_a_lost_machine_is_named(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    workers = _start_training(start_workers, jobs)
    workers.send_signal(lost, number)
    for index in range(2):
        result = workers.wait_for(index)
        assert result.exit_code == 1, result.output
        assert f"WorkerLostError: Lost {name} (127.0.0.1:" in result.output


@pytest.mark.alone
@pytest.mark.parametrize(("number", "lost", "jobs", "name"), LOSSES)
def test_a_lost_machine_is_known_in_time(
    start_workers: Any, number: int, lost: int, jobs: dict[str, int], name: str
) -> None:
    workers = _start_training(start_workers, jobs)
    since = time.monotonic()
    workers.send_signal(lost, number)
    # The error, not the end: TensorFlow's own farewell to a hanging machine takes longer.
    workers.wait_for_outputs([0, 1], f"WorkerLostError: Lost {name}")
    assert time.monotonic() - since < LONGEST_SECONDS


@pytest.mark.full
def test_a_spare_machine_serves_the_next_run(start_workers: Any) -> None:
    """Workers that were killed are started again; the machine has forgotten their last step."""
    environments = cluster_environments({"worker": 2, "summation": 1}, SECRET)
    machine = start_workers(
        "program_summation_fit.py", None, [FOR_EVER], environments=environments[2:]
    )
    machine.wait_for_output(0, "is ready")
    for _ in range(2):
        workers = start_workers(
            "program_summation_fit.py", None, [FOR_EVER], environments=environments[:2]
        )
        for index in range(2):
            workers.wait_for_output(index, "training")
        workers.close()


@pytest.mark.full
def test_a_spare_machine_sums_for_those_who_start_again_in_other_roles(start_workers: Any) -> None:
    first = cluster_environments({"worker": 3, "summation": 1}, SECRET)
    machine = start_workers("program_summation_fit.py", None, [FOR_EVER], environments=first[3:])
    machine.wait_for_output(0, "is ready")
    cluster = json.loads(first[0]["TF_CONFIG"])["cluster"]
    again = [dict(environment) for environment in first[:2]]
    for index, environment in enumerate(again):
        jobs = {"worker": cluster["worker"][:2], "summation": cluster["summation"]}
        task = {"type": "worker", "index": index}
        environment["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": task})
    # of another number of workers, without a choice of roles: a mistake
    for refused in start_workers("program_summation_fit.py", None, [20], environments=again).wait():
        assert refused.exit_code == 1
    chosen = [{**environment, CHOSEN_ROLES: "leave_out"} for environment in again]
    workers = start_workers("program_summation_fit.py", None, [40], environments=chosen)
    for result in workers.wait():
        assert result.exit_code == 0 and "training" in result.output, result.output


def test_without_a_secret_nothing_starts(start_workers: Any) -> None:
    for result in start_workers("program_summation_fit.py", {"worker": 2}, [20]).wait():
        assert result.exit_code == 1
        assert "needs one shared secret" in result.output


@pytest.mark.full
def test_another_secret_is_refused(start_workers: Any) -> None:
    environments = cluster_environments({"worker": 2}, SECRET)
    environments[1]["KERAS_HET_SERVICE_SECRET"] = "another one, 16 bytes"
    workers = start_workers("program_summation_fit.py", None, [20], environments=environments)
    # whoever asks first is refused; the other one may notice the loss before its own refusal
    outputs = [result.output for result in workers.wait()]
    assert any("refused this worker: its shared secret" in output for output in outputs)


def _start_training(start_workers: Any, jobs: dict[str, int]) -> Any:
    environments = cluster_environments(jobs, {**SECRET, **PATIENCE})
    workers = start_workers("program_summation_fit.py", None, [FOR_EVER], environments=environments)
    for index in range(jobs["worker"]):
        workers.wait_for_output(index, "training")
    return workers
