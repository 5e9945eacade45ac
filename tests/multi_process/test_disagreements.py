"""Workers that do not do the same: all are told at once, alike, and by name."""

from __future__ import annotations

from typing import Any

import pytest
from runs import Runs

# Parts of what each of three workers is told; worker 1 is the odd one.
TOLD = {
    "batch_size": [
        "do not agree on model.fit: batch size 8 on the chief and worker 2, 10 on worker 1"
    ],
    "epochs_and_steps": [
        "epochs 1 on the chief and worker 2, 2 on worker 1",
        "steps per epoch 3 on the chief and worker 2, 2 on worker 1",
    ],
    "rows_of_arrays": ["rows of x 24 on the chief and worker 2, 16 on worker 1"],
    "types_of_arrays": ["type of x float32 [5] on the chief and worker 2, float64 [5] on worker 1"],
    "rows_in_arrays": ["do not agree on model.fit: some rows of y hash "],
    "rows_in_slices": ["different data", "some rows of array 1 hash ", " on worker 1. Give every"],
    "what_a_map_makes": ["different data", "first sample after its maps hash "],
    "shards": ["different data", "index of shard (1) 0 on the chief, 1 on worker 1, 2 on worker 2"],
    "validation_data": ["rows of validation_data[0] 24 on the chief and worker 2, 16 on worker 1"],
    "sizes_of_layers": [
        "create different variables in strategy.scope() (",
        "type float32 [5, 4] on the chief and worker 2, float32 [5, 6] on worker 1",
    ],
    "number_of_layers": ["create different variables", "float32 [5, 5] on worker 1. Build the"],
    "kinds_of_layers": [
        "layer 0 (Dense).activation 'tanh' on the chief and worker 2, 'relu' on worker 1"
    ],
    "optimizers_and_losses": [
        "learning_rate",
        "'mse' on the chief and worker 2, 'mae' on worker 1",
    ],
    "learning_rates": ["(learning_rate): value 0.1 on the chief and worker 2, 0.5 on worker 1"],
    "weights": ["different weights: those of worker(s) [1] are not the chief's"],
    "shares": ["shares [0.3333, 0.3333, 0.3333] on the chief and worker 2, [0.5, 0.25, 0.25] on"],
    "settings_of_balancers": ["BatchBalancer.max_share 9 on the chief and worker 2, 5 on worker 1"],
    "batches_of_data": ["batches of x 3 on the chief and worker 2, 2 on worker 1"],
    "single_batches": ["do not agree on model.train_on_batch: rows of x 24 on the chief"],
    "balancer": ["that work together [] on the chief and worker 2, ['BatchBalancer'] on worker 1"],
    "different_calls": [
        "different points",
        "model.fit on the chief and worker 2, model.evaluate on",
    ],
    "barrier": ["different points", "strategy.barrier() on worker 1"],
    "stop_after_an_epoch": [
        "stopped at different steps: model.stop_training False on the chief and worker 2, True on"
    ],
    "metrics_after_an_epoch": [
        "different points",
        "the end of an epoch on the chief and worker 2, reading a metric (loss/",
    ],
    "no_batch_at_all": ["shares of the first batch [3, 3, 2] on the chief and worker 2, none on"],
    "nothing_for_anybody": ["dataset is empty: model.evaluate got no batch"],
    "model_outside": ["created outside of strategy.scope()", "model.train_on_batch"],
    "nothing": ["nothing differs"],  # after all the others: the cluster trains on
}


@pytest.fixture(scope="module")
def runs(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Runs:
    """The checks that are asked for, on one cluster."""
    items = [item for item in request.session.items if item.path == request.path]
    checks = [item.callspec.params["check"] for item in items if "runs" in item.fixturenames]
    folder, module = tmp_path_factory.mktemp("disagreements"), "disagreement_checks"
    jobs = {"worker": 3}
    return Runs(start_for_session, folder, module, checks, jobs, "1,1,1", has_single=False)


@pytest.mark.quick("batch_size", "rows_in_slices", "sizes_of_layers", "model_outside")
@pytest.mark.parametrize("check", TOLD)
def test_all_workers_report_what_differs(runs: Runs, check: str) -> None:
    messages = [str(results["message"]) for results in runs.of_workers(check)]
    assert len(set(messages)) == 1, messages
    for part in TOLD[check]:
        assert part in messages[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stop", "worker 1 has stopped at batch 4 of epoch 1 (model.stop_training is set)"),
        (
            "fit",
            "different numbers of batches: that of worker 1 ended after 4, and others continue",
        ),
        (
            "metrics",
            "reach reading a metric. Received: reading a metric on worker 1, in a callback",
        ),
        ("validation metrics", "Received: reading a metric on worker 1, in a callback"),
        ("evaluate", "reach model.evaluate. Received: model.evaluate on worker 1, in a callback"),
        ("predict_on_batch", "Received: model.predict_on_batch on worker 1, in a callback"),
        ("layers", "Received: new variables on worker 1, in a callback"),
        ("predict", "different numbers of batches: that of worker 1 ended after 4, and others"),
    ],
)
def test_a_worker_that_leaves_a_loop_alone(start_workers: Any, case: str, message: str) -> None:
    workers = start_workers("program_leave.py", {"worker": 3}, [case])
    last_lines = [result.output.splitlines()[-1] for result in workers.wait()]
    assert len(set(last_lines)) == 1, workers.tails()
    assert last_lines[0].startswith("ValueError: The workers")
    assert message in last_lines[0]
