"""Training over several processes gives what one device gives, on every worker.

Two clusters run all their checks in one go, beside a process with one device; the tests compare
what they have written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recorded import ONLY_WORKERS, OWN
from runs import HOSTS, Runs

UNEQUAL_DEVICES = (
    "built_by_fit",
    "shares_and_partial_batch",
    "zero_share_from_the_start",
    "micro_batches",
    "gradients_in_buckets",
    "compiled_by_xla",
    "compiled_by_xla_in_buckets",
    "compiled_by_xla_with_sparse_gradients",
    "compiled_by_xla_in_parts",
    "state_of_ones_own",
    "sharpness_aware_steps_with_vectors_in_logs",
    "steps_per_execution_with_pydataset",
    "executions_of_several_steps",
    "sample_weights_and_masks",
    "shares_change_within_the_epoch",
    "train_on_batch",
    "custom_training_loop",
    "loops_in_functions",
    "every_way_to_iterate",
    "collectives_in_replica_context",
    "sums_of_all_types",
    "ragged_predictions",
    "predictions_of_other_types",
)
# of any number of replicas
SEVERAL_GPUS = tuple(check for check in UNEQUAL_DEVICES if check != "sums_of_all_types")
# The unseeded one comes first, before another one sets a seed.
THREE_WORKERS = (
    "unseeded_numpy_shuffle",
    *UNEQUAL_DEVICES,
    "zero_share",
    "batch_normalization",
    "unknown_cardinality",
    "seeded_numpy_shuffle",
    "loss_scale_optimizer",
    "gradient_accumulation_and_clipping",
)
# What several processes do in another way than one; tests/exactness has the others in one process.
QUICK = (
    "unseeded_numpy_shuffle",
    "shares_and_partial_batch",
    "shares_change_within_the_epoch",
    "collectives_in_replica_context",
    "sums_of_all_types",
    "zero_share",
)
# The first test of a cluster waits for all its checks.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def three_workers(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Runs:
    """Workers of which the first and the last share a host."""
    folder = tmp_path_factory.mktemp("three_workers")
    checks = QUICK if pytestconfig.getoption("--quick") else THREE_WORKERS
    arguments = (start_for_session, folder, "exactness_checks", checks, {"worker": 3}, "1,1,1")
    return Runs(*arguments, hosts=HOSTS)


@pytest.fixture(scope="module")
def chief_and_worker(start_for_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A job "chief" with one device and a job "worker" with two."""
    folder = tmp_path_factory.mktemp("chief_and_worker")
    jobs = {"chief": 1, "worker": 1}
    return Runs(start_for_session, folder, "exactness_checks", UNEQUAL_DEVICES, jobs, "1,2")


@pytest.fixture(scope="module")
def workers_of_gpus(start_for_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Workers whose devices are summed as GPUs of one type are, by a collective of their own."""
    folder = tmp_path_factory.mktemp("workers_of_gpus")
    jobs, environment = {"chief": 1, "worker": 1}, {"SUM_AS_GPUS": "1"}
    arguments = (start_for_session, folder, "exactness_checks", SEVERAL_GPUS, jobs, "2,2")
    return Runs(*arguments, environment=environment)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("check", THREE_WORKERS)
def test_three_workers_equal_one_device(three_workers: Runs, check: str) -> None:
    three_workers.assert_as_one_device(check)


@pytest.mark.full
@pytest.mark.parametrize("check", UNEQUAL_DEVICES)
def test_workers_with_unequal_devices_equal_one_device(chief_and_worker: Runs, check: str) -> None:
    chief_and_worker.assert_as_one_device(check)


@pytest.mark.full
@pytest.mark.parametrize("check", SEVERAL_GPUS)
def test_workers_of_several_gpus_equal_one_device(workers_of_gpus: Runs, check: str) -> None:
    workers_of_gpus.assert_as_one_device(check)


def test_unseeded_order_is_shared_and_random(three_workers: Runs) -> None:
    chief, *_ = three_workers.of_workers("unseeded_numpy_shuffle")
    single = three_workers.of_one_device("unseeded_numpy_shuffle")
    # Weights equal on all workers are compared above; here that there was something to agree on.
    name = ONLY_WORKERS + "weight_0"
    assert not np.allclose(chief[name], single[name])


@pytest.mark.quick("three_workers")
@pytest.mark.parametrize("cluster", ["three_workers", "chief_and_worker"])
def test_collectives_keep_their_meaning(cluster: str, request: pytest.FixtureRequest) -> None:
    runs = request.getfixturevalue(cluster)
    for results in runs.of_workers("collectives_in_replica_context"):
        values = {name.removeprefix(ONLY_WORKERS): value for name, value in results.items()}
        assert values["sum"] == 1 + 2 + 3
        assert values["mean"] == 2
        # Two values on each of the replicas 0, 1 and 2, divided by the 6 of the global batch.
        assert values["average_loss"] == (0 + 0 + 1 + 1 + 2 + 2) / 6
        np.testing.assert_array_equal(values["gathered"], [[0, 0], [1, 1], [2, 2]])
        assert values["untouched"] == 3


@pytest.mark.quick("three_workers")
@pytest.mark.parametrize("cluster", ["three_workers", "chief_and_worker"])
def test_new_shares_cut_the_batches_of_later_steps(
    cluster: str, request: pytest.FixtureRequest
) -> None:
    runs = request.getfixturevalue(cluster)
    name = OWN + "sizes"
    sizes = sum(results[name] for results in runs.of_workers("shares_change_within_the_epoch"))
    np.testing.assert_array_equal(np.sum(sizes, axis=1), [8] * 8)
    # Set after the third step; two more were cut already.
    np.testing.assert_array_equal(sizes[:5], [[3, 3, 2]] * 5)
    np.testing.assert_array_equal(sizes[5:], [[0, 5, 3]] * 3)


@pytest.mark.full
def test_batch_normalization_is_not_left_at_its_start(three_workers: Runs) -> None:
    # weights: kernel, bias, gamma, beta, moving mean, moving variance, ...
    chief, *_ = three_workers.of_workers("batch_normalization")
    assert np.abs(chief[f"{ONLY_WORKERS}weight_4"]).max() > 1e-4
    assert np.abs(chief[f"{ONLY_WORKERS}weight_5"] - 1).max() > 1e-4


@pytest.mark.full
def test_the_end_of_unknown_data_is_no_iteration(three_workers: Runs) -> None:
    for results in three_workers.of_workers("unknown_cardinality"):
        assert results[ONLY_WORKERS + "iterations"] == 2 * 3
