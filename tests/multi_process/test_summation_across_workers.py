"""Gradients summed by all machines give the weights of one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from forked_workers import cluster_environments
from hybrid_clusters import SECRET
from runs import HOSTS, Runs

from keras_het.strategy.cluster.cluster_config import CHOSEN_ROLES

# Of float32 values: small enough that every machine gets several partitions.
SETTINGS = {"partition_bytes": 16, "partitions_in_flight": 2}
QUICK = ("shares_and_partial_batch",)
CHECKS = (
    *QUICK,
    "zero_share",
    "shares_change_within_the_epoch",
    "gradient_accumulation_and_clipping",
    "batch_normalization",
    "sample_weights_and_masks",
    "compiled_by_xla",
    "loss_scale_optimizer",
    "custom_training_loop",
)
# Of workers with several devices: what their replicas reduce among each other first.
CHECKS_OF_DEVICES = (
    "shares_and_partial_batch",
    "zero_share",
    "loss_scale_optimizer",
    "gradient_accumulation_and_clipping",
    "custom_training_loop",
)
FOR_EVER = 10_000_000
pytestmark = pytest.mark.timeout(600)


class Cluster(NamedTuple):
    """Devices of each worker, spare machines, checks, settings, and the host of each task."""

    devices: str
    num_spare: int
    checks: tuple[str, ...]
    settings: dict[str, Any] = {}  # noqa: RUF012
    hosts: tuple[str, ...] | None = None


RATES = {"link_rates": [1.2, 1.0, 1.1], "spare_link_rates": [0.9]}
MEASURED = {"link_rates": "measured"}
SHARED = "workers that share a host"
CLUSTERS = {
    SHARED: Cluster("1,1,1", 1, CHECKS, RATES, HOSTS and (*HOSTS, HOSTS[0])),
    "no spare machine": Cluster("1,1,1", 0, CHECKS, MEASURED),
    "unequal devices": Cluster("2,1", 1, (*CHECKS_OF_DEVICES, "compiled_by_xla")),
    "two devices each": Cluster("2,2", 0, CHECKS_OF_DEVICES),
    # which then sum everything
    "as many spare machines": Cluster(
        "2,1", 2, (*CHECKS_OF_DEVICES[:2], "gradient_accumulation_and_clipping")
    ),
}
QUICK_CLUSTER = SHARED


@pytest.fixture(scope="module")
def runs_of(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str], Runs]:
    """Runs a cluster's checks when it is first asked for."""

    @functools.cache
    def run(name: str) -> Runs:
        cluster = CLUSTERS[name]
        jobs = {"worker": len(cluster.devices.split(",")), "summation": cluster.num_spare}
        return Runs(
            start_for_session,
            tmp_path_factory.mktemp("summation"),
            "exactness_checks",
            QUICK if pytestconfig.getoption("--quick") else cluster.checks,
            {job: count for job, count in jobs.items() if count},
            cluster.devices,
            {**SETTINGS, **cluster.settings},
            SECRET,
            hosts=cluster.hosts,
        )

    return run


@pytest.mark.quick(*(f"{QUICK_CLUSTER}-{check}" for check in QUICK))
@pytest.mark.parametrize(
    ("cluster", "check"),
    [(name, check) for name, cluster in CLUSTERS.items() for check in cluster.checks],
)
def test_equals_one_device(runs_of: Any, cluster: str, check: str) -> None:
    runs_of(cluster).assert_as_one_device(check)


@pytest.mark.quick(QUICK_CLUSTER)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_machine_sums(runs_of: Any, cluster: str) -> None:
    runs, num_spare = runs_of(cluster), CLUSTERS[cluster].num_spare
    workers, num_workers = runs.workers, runs.num_workers
    results = [workers.wait_for(index) for index in range(num_workers)]
    assert all(result.exit_code == 0 for result in results), workers.tails()
    # of each machine, as the first worker says
    *_, line = (line for line in results[0].output.splitlines() if "partitions" in line)
    partitions = json.loads(line.split(maxsplit=1)[1])
    if num_spare == num_workers:
        assert partitions[:num_workers] == [0] * num_workers
        partitions = partitions[num_workers:]
    if CLUSTERS[cluster].settings == MEASURED:  # of links within a machine anything may be found
        assert sum(partitions) > len(runs.checks)
    else:
        assert min(partitions) > len(runs.checks)


def fit(start_workers: Any, environments: Any, steps: int = FOR_EVER) -> Any:
    """Tasks that train, or sum, with gradients summed by machines."""
    options = {"steps": steps, "gradient_reduction": "summation"}
    return start_workers(
        "program_fit.py", arguments=[json.dumps(options)], environments=environments
    )


@pytest.mark.full
def test_a_spare_machine_serves_the_next_run(start_workers: Any) -> None:
    """Workers that were killed are started again; the machine has forgotten their last step."""
    environments = cluster_environments({"worker": 2, "summation": 1}, SECRET)
    machine = fit(start_workers, environments[2:])
    machine.wait_for_output(0, "is ready")
    for _ in range(2):
        workers = fit(start_workers, environments[:2])
        workers.wait_for_outputs(range(2), "training")
        workers.close()


@pytest.mark.full
def test_a_spare_machine_sums_for_those_who_start_again_in_other_roles(start_workers: Any) -> None:
    first = cluster_environments({"worker": 3, "summation": 1}, SECRET)
    machine = fit(start_workers, first[3:])
    machine.wait_for_output(0, "is ready")
    cluster = json.loads(first[0]["TF_CONFIG"])["cluster"]
    again = [dict(environment) for environment in first[:2]]
    for index, environment in enumerate(again):
        jobs = {"worker": cluster["worker"][:2], "summation": cluster["summation"]}
        task = {"type": "worker", "index": index}
        environment["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": task})
    # of another number of workers, without a choice of roles: a mistake
    for refused in fit(start_workers, again).wait():
        assert refused.exit_code == 1
    chosen = [{**environment, CHOSEN_ROLES: "leave_out"} for environment in again]
    for result in fit(start_workers, chosen, 40).wait():
        assert result.exit_code == 0 and "training" in result.output, result.output
