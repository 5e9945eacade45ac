"""A training continues exactly when workers and machines are lost and added, on real Ray nodes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import program_elastic
import psutil
import pytest
from _namespaces import limited_hosts, why_not
from devices import create_logical_devices
from program_async import EPOCHS as ASYNC_EPOCHS
from program_elastic import BATCH, EPOCHS, NUM_SAMPLES, RATE

pytest.importorskip("ray", reason="needs Ray: the extra `ray`")

PROGRAM = Path(__file__).with_name("program_elastic.py")
TUNE_PROGRAM = Path(__file__).with_name("program_tune.py")
ASYNC_PROGRAM = Path(__file__).with_name("program_async.py")
# Ray starts a dozen processes for each node.
SECONDS = 560
# A busy machine starts Ray's processes slowly.
ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_USAGE_STATS_ENABLED": "0",
}
pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.fixture
def run(tmp_path):
    def run(prefix=(), program=PROGRAM, **config):
        options = json.dumps({"nodes": 3, **config})
        command = [*prefix, sys.executable, str(program), str(tmp_path), options]
        environment = {**os.environ, **ENVIRONMENT}
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired as late:
                pytest.fail(f"not ready after {SECONDS} s:\n{late.output}")
            finally:
                process.kill()
                reap(process.pid)
        assert not memory_folders(tmp_path) or "lose_store" in config.get("events", ())
        return subprocess.CompletedProcess(command, process.returncode, output)

    return run


def reap(session):
    """End what is left of a program's session; Ray's processes may have sessions of their own."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                process.kill()
        except (OSError, psutil.Error):
            continue


def memory_folders(folder):
    digest = hashlib.sha256(str(folder / "shared").encode()).hexdigest()
    return list(Path("/dev/shm").glob(f"keras_het-*-{digest[:8]}"))


def rows(folder):
    found = [
        json.loads(line)
        for path in folder.glob("steps-*")
        for line in path.read_text().splitlines()
        if line.endswith("]")
    ]
    return sorted(found, key=lambda row: row[3])


def train_on_one_device(folder=None):
    import keras

    import keras_het

    keras.utils.set_random_seed(0)
    with keras_het.HeterogeneousStrategy(create_logical_devices()[:1]).scope():
        model, x, y = program_elastic.model_and_data()
    program_elastic.fit(model, x, y, [], folder)
    return model.get_weights()


@pytest.fixture(scope="module")
def undisturbed():
    """Weights of one device that trains alone."""
    return train_on_one_device()


def assert_exact(folder, undisturbed):
    weights = list(np.load(folder / "weights.npz").values())
    (kernel,) = [each for each in weights if each.shape == (NUM_SAMPLES, 1)]
    uses = -kernel.ravel() * BATCH / RATE
    np.testing.assert_allclose(uses, EPOCHS, atol=1e-3)
    for own, expected in zip(weights, undisturbed, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


def sizes_of_groups(folder):
    """Number of workers of each group that has trained, in their order."""
    sizes: list[int] = []
    last = None
    for row in rows(folder):
        if row[1] != last and not (sizes and sizes[-1] == row[1]):
            sizes.append(row[1])
        last = row[1]
    return sizes


LOSSES = [
    pytest.param(
        {"nodes": 0, "on_head": 2, "step_seconds": 0.01, "events": ["kill 1"]}, [2], id="a-worker"
    ),
    pytest.param(
        {"events": ["kill 1", "lose", "kill 0", "add"]}, [3, 2, 3], id="workers-and-machines"
    ),
]


@pytest.mark.quick("a-worker")
@pytest.mark.parametrize(("config", "sizes"), LOSSES)
def test_workers_and_machines_come_and_go(run, tmp_path, undisturbed, config, sizes):
    result = run(**config)
    assert result.returncode == 0, result.stdout
    assert_exact(tmp_path, undisturbed)
    assert sizes_of_groups(tmp_path) == sizes, result.stdout
    first_steps: dict[int, int] = {}
    for process_id, _, step, _ in rows(tmp_path):
        first_steps.setdefault(process_id, step)
    later = list(first_steps.values())[sizes[0] :]  # of groups that have gone on from a backup
    assert later and min(later) > 1, result.stdout
    reported = json.loads((tmp_path / "reported").read_text())
    assert reported["epoch"] == EPOCHS
    assert np.isfinite(reported["loss"])
    assert zipfile.is_zipfile(tmp_path / "model.keras")


@pytest.mark.full
def test_an_error_of_the_script_ends_all_at_once(run, tmp_path):
    result = run(fails=10)
    assert result.returncode == 1, result.stdout
    last = result.stdout.rstrip().rsplit("TrainFunctionError: Traceback", 1)[-1]
    assert last.endswith("KeyError: 'a mistake of the script'"), result.stdout
    assert max(row[2] for row in rows(tmp_path)) == 10
    assert len({row[0] for row in rows(tmp_path)}) == 3  # no second group


EVENTS = [
    pytest.param({"events": ["kill 0 1"]}, id="two-at-once"),
    pytest.param({"events": ["kill 0 1 2"]}, id="all-at-once"),
    pytest.param({"events": ["drain"]}, id="preempted"),
    pytest.param({"events": ["terminate"]}, id="sigterm-of-a-node"),
    pytest.param({"events": ["lose_and_add"], "least": 3}, id="below-the-least-and-back"),
    pytest.param(
        {"events": ["kill 0", "lose 0", "add"], "shares_nothing": True}, id="nothing-shared"
    ),
    pytest.param({"events": ["kill 1"], "save_freq": "auto"}, id="save-freq-by-time"),
    pytest.param({"events": ["kill 1"], "save_freq": "epoch"}, id="save-freq-by-epoch"),
    *(
        pytest.param({"dies": phase}, id=phase.replace(" ", "-"))
        for phase in (
            *("start", "begin of fit", "first step", "save", "validation", "end of an epoch"),
            *("last step", "after fit"),
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("config", EVENTS)
def test_every_loss_is_exact(run, tmp_path, undisturbed, config):
    result = run(**config)
    assert result.returncode == 0, result.stdout
    assert_exact(tmp_path, undisturbed)
    if config.get("shares_nothing"):
        newest = [sorted(each.glob("*/backup-*"))[-1:] for each in tmp_path.glob("memory-*")]
        assert len(newest) == 4 and all(newest)
    if "dies" in config:
        assert (tmp_path / "died").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one device ends with, and its callbacks."""
    folder = tmp_path_factory.mktemp("alone")
    np.savez(folder / "weights.npz", *train_on_one_device(folder))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("dies", ["first step", "step 35", "validation", "end of an epoch", "save"])
def test_callbacks_continue_as_if_nothing_had_happened(run, tmp_path, alone, dies):
    """Seven epochs; the weights of the first one are the best."""
    result = run(nodes=0, on_head=2, dies=dies, remembers=True, step_seconds=0.01)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "died").exists()
    if dies == "step 35":
        assert len({row[0] for row in rows(tmp_path)}) == 4
    expected, found = (
        json.loads((each / "history.json").read_text()) for each in (alone, tmp_path)
    )
    assert found["epochs"] == expected["epochs"] == list(range(7))
    assert found.keys() == expected.keys() and found["rate"] < RATE
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    tables = [np.genfromtxt(each / "rows.csv", delimiter=",") for each in (alone, tmp_path)]
    np.testing.assert_allclose(tables[1], tables[0], atol=1e-5)
    assert len(tables[0]) == 1 + 7
    for name in ("best.weights.h5", "weights.npz"):
        pairs = zip(arrays_in(tmp_path / name), arrays_in(alone / name), strict=True)
        for own, one in pairs:
            np.testing.assert_allclose(own, one, atol=1e-5, err_msg=name)


def arrays_in(path):
    if path.suffix == ".npz":
        return list(np.load(path).values())
    found: list[np.ndarray] = []
    with h5py.File(path) as file:
        file.visititems(
            lambda _, each: found.append(each[()]) if isinstance(each, h5py.Dataset) else None
        )
    return found


@pytest.mark.full
@pytest.mark.network_namespaces
def test_a_machine_is_cut_off_and_comes_back(run, tmp_path, undisturbed):
    if reason := why_not():
        pytest.skip(reason)
    with limited_hosts([1000.0, 1000.0]) as hosts, ThreadPoolExecutor(1) as pool:
        pool.submit(plug_when_asked, hosts, tmp_path, ("down", "up"))
        result = run(
            hosts.command(0, []),
            nodes=2,
            hosts=[hosts.address(0), hosts.address(1), *hosts.command(1, [])],
            events=["link down", "link up"],
        )
        for state in ("down", "up"):  # so that the thread ends
            (tmp_path / f"link-{state}").touch()
    assert result.returncode == 0, result.stdout
    assert_exact(tmp_path, undisturbed)
    assert sizes_of_groups(tmp_path) == [3, 2, 3], result.stdout


def plug_when_asked(hosts, folder, states):
    deadline = time.monotonic() + SECONDS
    for state in states:
        while not (request := folder / f"link-{state}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        hosts.set_link(1, state == "up")
        request.unlink(missing_ok=True)


@pytest.mark.full
def test_training_continues_in_another_cluster_when_the_head_is_lost(run, tmp_path, undisturbed):
    result = run(events=["lose_store"])
    assert "Failed to connect to GCS" in result.stdout
    before = {row[0]: row[2] for row in rows(tmp_path)}
    result = run()
    assert result.returncode == 0, result.stdout
    assert_exact(tmp_path, undisturbed)
    first_step = min(row[2] for row in rows(tmp_path) if row[0] not in before)
    assert 1 < first_step <= max(before.values()) + 1


@pytest.mark.full
def test_a_slow_node_trains_asynchronously_and_is_lost(run, tmp_path):
    result = run(program=ASYNC_PROGRAM)
    assert result.returncode == 0, result.stdout
    assert json.loads((tmp_path / "reported").read_text())["epoch"] == ASYNC_EPOCHS
    assert (tmp_path / "died").exists()
    steps = Counter((tmp_path / "async-steps").read_text().split())
    assert len(steps) == 2 and min(steps.values()) >= 3
    kernel, bias = np.load(tmp_path / "weights.npz").values()
    np.testing.assert_allclose(kernel, np.ones((4, 1)), atol=1e-4)
    np.testing.assert_allclose(bias, 0, atol=1e-4)


@pytest.mark.full
def test_tune_sees_each_epoch(run, tmp_path):
    result = run(program=TUNE_PROGRAM)
    assert result.returncode == 0, result.stdout
    told = json.loads((tmp_path / "told").read_text())
    assert told["best"] == 0.1
    assert [epoch for epoch, _ in told["told"].values()] == [3, 3]


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_twenty_generations_leave_nothing_behind(run, tmp_path, undisturbed, part):
    result = run(events=[f"kill {event % 3}" for event in range(part, part + 5)])
    assert result.returncode == 0, result.stdout
    assert_exact(tmp_path, undisturbed)


@pytest.mark.full
def test_workers_lost_again_and_again_end_the_training(run, tmp_path):
    result = run(dies="always")
    assert result.returncode == 1, result.stdout
    assert (
        "MaxFailuresExceededError: Workers were lost 4 times in a row, and no backup got further"
        in result.stdout
    )
