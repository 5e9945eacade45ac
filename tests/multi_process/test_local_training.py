"""Workers that train on their own and exchange by a synchronous rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_workers import TIMEOUT
from local_training_reference import Simulation, loss_of
from recorded import arrays

from keras_het.fit.backup_folder import BackupFolder

SAMPLES, BATCH, STEPS = 44, 8, 6
VALIDATION_SAMPLES = 15
EPOCHS = 2


def rule(name: str, **config: Any) -> dict[str, Any]:
    return {"class_name": name, "config": config}


CASES: dict[str, dict[str, Any]] = {
    "diloco": {"rule": rule("diloco", period=3), "waits": 2, "trains_again": True},
    # exchanges at 5 and 10, and one more at the end
    "unequal shares": {
        "rule": rule("diloco", period=5),
        "shares": [3, 1],
        "momentum": 0.9,
        "rate": 0.03,
        "trains_again": True,
    },
    "sync_easgd": {"rule": rule("sync_easgd", num_workers=2, period=2), "shares": [2, 1]},
    "sync_easgd overlapped": {
        "rule": rule("sync_easgd", num_workers=2, period=2, overlap=1, alpha=0.3),
        "momentum": 0.9,
        "rate": 0.03,
    },
    # the authors' Sync EASGD3: each exchange travels during one step
    "sync_easgd in every step": {
        "rule": rule("sync_easgd", num_workers=2, period=1, overlap=1),
        "shares": [2, 1],
    },
    "diloco overlapped": {"rule": rule("diloco", period=4, overlap=2), "shares": [1, 2]},
    "moving statistics": {
        "rule": rule("diloco", period=3),
        "normalized": True,
        "shares": [2, 1],
    },
    "moving statistics overlapped": {
        "rule": rule("sync_easgd", num_workers=2, period=3, overlap=1),
        "normalized": True,
        "shares": [2, 1],
    },
    "compiled": {"rule": rule("diloco", period=3), "jit_compile": True},
    # the second worker has none of the 4 samples of the last batch
    "no samples": {"rule": rule("diloco", period=6), "shares": [7, 1], "normalized": True},
}
# The last ones switch on the measurement of compute times.
MISTAKES: dict[str, dict[str, Any]] = {
    "interrupted": {"rule": rule("diloco", period=5), "stop_at": 3, "trains_again": True},
    "balancer after": {"rule": rule("diloco", period=3), "balancer": "after"},
    "balancer before": {"rule": rule("diloco", period=3), "balancer": "before"},
    "number of workers": {"rule": rule("sync_easgd", num_workers=3)},
}


# An exchange that is waited for, one that travels while steps continue, and unequal shares.
QUICK = ("diloco", "sync_easgd overlapped", "moving statistics")
QUICK_MISTAKE = "number of workers"
FULL = pytest.mark.full


def start(start_workers: Any, folder: Path, cases: dict[str, Any], devices: str = "1,1") -> Any:
    workers = start_workers(
        "program_local_training.py", {"worker": 2}, [folder, json.dumps(cases), devices]
    )
    for worker in workers.wait():
        assert worker.exit_code == 0, worker.output
    return {name: load(folder, name) for name in cases}


def load(folder: Path, name: str) -> list[dict[str, np.ndarray]]:
    results = []
    for index in range(2):
        with np.load(folder / f"{name}-{index}.npz") as stored:
            results.append(dict(stored))
    return results


@pytest.fixture(scope="module")
def results(
    start_for_session: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, Any]:
    cases = {**CASES, **MISTAKES}
    if pytestconfig.getoption("--quick"):
        cases = {name: cases[name] for name in (*QUICK, QUICK_MISTAKE)}
    return dict(start(start_for_session, tmp_path_factory.mktemp("local"), cases))


def listed(result: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    found = [key for key in result if key.startswith(f"{name}/")]
    return [result[f"{name}/{position}"] for position in range(len(found))]


def simulated(case: dict[str, Any], result: dict[str, np.ndarray], shares: Any = None) -> Any:
    x, y = arrays(SAMPLES)
    # Keras lists weights layer by layer; moving statistics come first here
    begin = [weight.astype(np.float64) for weight in listed(result, "start")]
    worker_shares = tuple(shares or case.get("shares", (1, 1)))
    simulation = Simulation(
        case, begin, x.astype(np.float64), y.astype(np.float64), BATCH, worker_shares
    )
    simulation.run(case.get("epochs", EPOCHS))
    return simulation


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    for position, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(
            own, other, rtol=2e-4, atol=5e-6, err_msg=f"{what}, array {position}"
        )


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_the_equations(results: dict[str, Any], name: str) -> None:
    case, workers = CASES[name], results[name]
    simulation = simulated(case, workers[0])
    assert len(simulation.history) == EPOCHS * STEPS
    for step, (weights, centers) in enumerate(simulation.history, start=1):
        for index, worker in enumerate(workers):
            what = f"worker {index} after step {step}"
            assert_close(listed(worker, f"step_{step}"), weights[index], what)
            assert_close(listed(worker, f"center_{step}"), centers, f"center, {what}")
    for epoch, center in enumerate(simulation.epochs):
        assert_close(listed(workers[0], f"epoch_{epoch}"), center, f"center of epoch {epoch}")
    validation = [loss_of(center, *arrays(VALIDATION_SAMPLES)) for center in simulation.epochs]
    for worker in workers:
        np.testing.assert_allclose(worker["history/val_loss"], validation, rtol=2e-4)
    assert_close(listed(workers[1], "end"), simulation.final, "the end")


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", CASES)
def test_workers_have_the_same_bits_of_the_center(results: dict[str, Any], name: str) -> None:
    one, two = results[name]
    equal = [
        key
        for key in one
        if key.startswith(("start/", "center_", "epoch_", "end/", "log_", "history/"))
        or key in ("evaluate", "exchanges", "again")
    ]
    assert len(equal) > 30
    for key in equal:
        np.testing.assert_array_equal(one[key], two[key], err_msg=key)


@pytest.mark.parametrize("name", ["diloco", "moving statistics"])
def test_weights_are_the_center_right_after_an_exchange(results: dict[str, Any], name: str) -> None:
    one, two = results[name]
    period = CASES[name]["rule"]["config"]["period"]
    for step in range(1, EPOCHS * STEPS + 1):
        pairs = list(zip(listed(one, f"step_{step}"), listed(two, f"step_{step}"), strict=True))
        same = all(np.array_equal(first, second) for first, second in pairs)
        assert same == (step % period == 0), step


@pytest.mark.quick("moving statistics")
@pytest.mark.parametrize(
    "name", ["diloco", "unequal shares", "sync_easgd overlapped", "moving statistics"]
)
def test_logs_of_an_epoch_cover_all_samples(results: dict[str, Any], name: str) -> None:
    losses = simulated(CASES[name], results[name][0]).losses
    np.testing.assert_allclose(results[name][1]["history/loss"], losses, rtol=1e-4)


def test_local_steps_have_no_collective_between_workers(results: dict[str, Any]) -> None:
    # that worker 0 went two steps ahead of worker 1 is shown by "waits", which would not end
    for worker in results["diloco"]:
        assert int(worker["collectives/local"]) == 0
        assert int(worker["collectives/global"]) > 0


@pytest.mark.full
def test_each_worker_used_its_own_share(results: dict[str, Any]) -> None:
    # the first step of an epoch has those of the evaluation before it too
    one, two = (worker["samples"][-STEPS + 1 :] for worker in results["unequal shares"])
    assert one.tolist() == [6, 6, 6, 6, 3]
    assert two.tolist() == [2, 2, 2, 2, 1]


@pytest.mark.full
def test_replicas_of_a_worker_are_reduced_exactly(start_workers: Any, tmp_path: Path) -> None:
    case = {"rule": rule("diloco", period=4), "shares": [2, 1, 1], "momentum": 0.9, "rate": 0.03}
    easgd = {"rule": rule("sync_easgd", num_workers=2, overlap=1, period=2), "shares": [1, 2, 1]}
    cases = {"diloco": case, "sync_easgd": easgd, "compiled": {**easgd, "jit_compile": True}}
    found = start(start_workers, tmp_path, cases, "2,1")
    for name, options in cases.items():
        assert (found[name][0]["compiled"] > 0) == (name == "compiled")
        simulation = simulated(options, found[name][0], shares=(3, 1))
        for step, (weights, _) in enumerate(simulation.history, start=1):
            for index, worker in enumerate(found[name]):
                what = f"{name}, worker {index} after step {step}"
                assert_close(listed(worker, f"step_{step}"), weights[index], what)


@pytest.mark.full
def test_several_steps_at_once(start_workers: Any, tmp_path: Path) -> None:
    case = {"rule": rule("diloco", period=3), "steps_per_execution": 3, "epochs": 3}
    workers = start(start_workers, tmp_path, {"three": case})["three"]
    final = simulated(case, workers[0]).final
    for index, worker in enumerate(workers):
        assert_close(listed(worker, "end"), final, f"worker {index}")


def interrupted_and_resumed(
    start_workers: Any, folder: Path, options: dict[str, Any], stop_at: int
) -> tuple[Any, Any]:
    """What workers do without an interruption, and after one in the step `stop_at`."""
    whole = {name: value for name, value in options.items() if name != "save_freq"}
    options = {**options, "backup": str(folder / "backup")}
    cut = {"cut": {**options, "stop_at": stop_at}}
    found = start_workers(
        "program_local_training.py",
        {"worker": 2},
        [folder, json.dumps({"whole": whole, **cut})],
    )
    for worker in found.wait():
        assert worker.exit_code == 0, worker.output
    assert not (folder / "cut-0.npz").exists()
    backup = BackupFolder(folder / "backup", 1)
    assert backup.find() and "service/local_training/counts" in backup.state()
    resumed = start(start_workers, folder, {"cut": options})["cut"]
    return load(folder, "whole"), resumed


@pytest.mark.full
def test_a_backup_has_center_and_outer_momentum(start_workers: Any, tmp_path: Path) -> None:
    options = {"rule": rule("diloco", period=3), "epochs": 3, "shares": [2, 1]}
    whole, resumed = interrupted_and_resumed(start_workers, tmp_path, options, STEPS + 2)
    for index in range(2):
        # the first epoch ends with an exchange, so that nothing is lost
        assert f"step_{2 * STEPS + 1}/0" not in resumed[index]
        for step in range(1, 2 * STEPS + 1):
            name = f"step_{step}"
            expected = listed(whole[index], f"step_{STEPS + step}")
            assert_close(listed(resumed[index], name), expected, f"worker {index}, {name}")
        assert_close(listed(resumed[index], "end"), listed(whole[index], "end"), "the end")


@pytest.mark.full
def test_a_backup_has_the_exchange_on_its_way(start_workers: Any, tmp_path: Path) -> None:
    options = {
        "rule": rule("sync_easgd", num_workers=2, period=4, overlap=2),
        "epochs": 2,
        "save_freq": 3,
    }
    # begun at step 8, in the backup of step 9, merged at step 10
    whole, resumed = interrupted_and_resumed(start_workers, tmp_path, options, STEPS + 4)
    chief = whole[0]
    assert_close(listed(resumed[0], "step_1"), listed(chief, f"step_{STEPS + 4}"), "step 10")
    for one, two in zip(listed(resumed[0], "end"), listed(resumed[1], "end"), strict=True):
        np.testing.assert_array_equal(one, two)
    for worker in resumed:
        center = listed(worker, "center_1")
        np.testing.assert_allclose(center, listed(chief, f"center_{STEPS + 4}"), rtol=1e-6)
        # the other worker continues from the chief's weights
        assert int(worker["exchanges"]) == 1


@pytest.mark.full
def test_a_training_that_failed_leaves_no_local_steps(results: dict[str, Any]) -> None:
    one, two = results["interrupted"]
    np.testing.assert_array_equal(one["again"], two["again"])
    assert int(one["collectives/global"]) > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "balancer after", "Compute times travel in the collective of each step", marks=FULL
        ),
        pytest.param(
            "balancer before", "Compute times travel in the collective of each step", marks=FULL
        ),
        (QUICK_MISTAKE, "Received: num_workers=3; the cluster has 2"),
    ],
)
def test_what_cannot_be_is_refused(results: dict[str, Any], name: str, text: str) -> None:
    for worker in results[name]:
        assert text in str(worker["error"])


@pytest.mark.full
def test_a_lost_worker_is_named_at_the_next_exchange(start_workers: Any, tmp_path: Path) -> None:
    cases = {"lost": {"rule": rule("diloco", period=4), "stop_at": 2, "dies": True}}
    workers = start_workers(
        "program_local_training.py", {"worker": 2}, [tmp_path, json.dumps(cases)]
    )
    survivor, victim = workers.wait()
    assert victim.exit_code == -9 and survivor.exit_code not in (0, -9)
    assert "WorkerLostError: Lost worker 1" in survivor.output


@pytest.mark.full
@pytest.mark.parametrize("overlap", [0, 2])
def test_shares_follow_the_speeds_of_the_workers(launch: Any, tmp_path: Path, overlap: int) -> None:
    """Speeds 3:1 give 30 and 10 of 40 samples, by what the exchanges say."""
    options = {"folder": str(tmp_path), "period": 5, "overlap": overlap}
    process = launch(
        "program_local_balance.py",
        options,
        "--emulate-speeds",
        "3,1",
        "--emulate-ms-per-sample",
        "3",
    )
    process.join(TIMEOUT)
    found = [np.load(tmp_path / f"{index}.npz") for index in range(2)]
    fast, slow = (each["samples"][1:] for each in found)
    assert set(fast + slow) == {40}  # every sample once
    assert list(fast[:3]) == [20] * 3  # nothing was exchanged yet
    # Of many steps, since a busy host may slow one of them for a while.
    assert abs(np.median(fast[-30:]) - 30) <= 3, fast
    np.testing.assert_array_equal(found[0]["weights"], found[1]["weights"])
