"""Runs every recipe as a reader would and checks what it prints."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
TIMEOUT = 580  # beside other tests, several times as long as alone
# Not recipes but parts of them.
PARTS = {
    "digits.py",
    "extras.py",
    "quickstart_figure.py",
    "quickstart_worker.py",
    "stopwatch.py",
    "straggler_figure.py",
    "tune_loader_figure.py",
    "workers.py",
}
LAUNCHER = ("-m", "keras_het", "run")

pytestmark = [pytest.mark.full, pytest.mark.multi_process, pytest.mark.timeout(TIMEOUT + 20)]


def run(*arguments: object, cwd: Path) -> str:
    """Runs Python with these arguments and returns what it prints; kills its group at the end."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        # Ctrl-C, so that the recipe ends its workers.
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
        pytest.fail(f"{arguments} took longer than {TIMEOUT} s:\n{stdout}\n{stderr}")
    assert process.returncode == 0, f"{arguments} failed:\n{stdout}\n{stderr}"
    return stdout


def numbers(pattern: str, text: str) -> list[float]:
    """All numbers that the group of the pattern matches; at least one."""
    found = [float(match) for match in re.findall(pattern, text)]
    assert found, f"no {pattern!r} in:\n{text}"
    return found


def cells(row: str, text: str) -> list[str]:
    """The cells of a table's row by the name in its first column."""
    line = next(line for line in text.splitlines() if row in line and "│" in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_every_recipe_is_tested() -> None:
    source = Path(__file__).read_text()
    recipes = {path.name for path in RECIPES.glob("*.py")} - PARTS
    assert {name for name in recipes if f'RECIPES / "{name}"' not in source} == set()


def samples(cell: str) -> list[int]:
    """The shares in a table's cell."""
    return [int(share) for share in cell.split("+")]


def assert_is_picture(path: Path) -> None:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", header[16:24])) > 300


@pytest.mark.alone
def test_quickstart(tmp_path: Path) -> None:
    text = run(RECIPES / "quickstart.py", "--epochs", 2, cwd=tmp_path)

    assert "EMULATION: device speeds 4:2:1" in text
    even, balanced = cells("even split", text), cells("balanced", text)
    one, limit = cells("one device", text), cells("all devices, at best", text)
    assert even[1] == "19 + 19 + 18"
    assert sum(samples(balanced[1])) == 56
    # The balancer was not told the speeds 4:2:1, nor these shares.
    assert np.abs(np.subtract(samples(balanced[1]), [32, 16, 8])).max() <= 4
    assert re.search(r"step \d+: shares [\d ]+ \(min_max: ", text), "plans are shown"
    # Emulated times are lower bounds: 18 samples take 288 ms on the slowest device.
    assert numbers(r"(\d+) ms", even[2])[0] >= 288
    assert float(even[3]) <= 56 / 0.288
    assert float(balanced[3]) <= float(limit[3]) == 438
    assert numbers(r"Speed-up .*: ([\d.]+) x", text)
    assert max(float(even[5]), float(balanced[5])) < 1e-4
    assert even[4] == balanced[4] == one[4]
    assert float(one[4].rstrip("%")) > 50  # Chance is 10 %.
    assert "recipes/straggler.py" in text
    assert text.splitlines()[-1].strip().startswith("docs/")
    assert_is_picture(tmp_path / "quickstart.png")


@pytest.mark.alone
def test_straggler_is_followed_both_ways(tmp_path: Path) -> None:
    text = run(RECIPES / "straggler.py", "--steps-per-phase", 25, cwd=tmp_path)

    assert "EMULATION: device speeds 1:1:1" in text
    for title, expected in (
        ("before", [20, 20, 20]),
        ("slow", [26, 8, 26]),
        ("recovered", [20, 20, 20]),
    ):
        last_shares = samples(cells(f"│ {title} ", text)[-1])
        assert sum(last_shares) == 60
        assert np.abs(np.subtract(last_shares, expected)).max() <= 4, title
    slow, recovered = numbers(r"balanced after (\d+) steps", text)
    assert 0 < slow <= 20
    assert recovered <= 20
    # With the even split the slow worker needs 300 ms for its 20 samples.
    assert numbers(r"(\d+) ms", cells("│ slow ", text)[1])[0] >= 300
    assert numbers(r"from the even split's: (\S+)", text)[0] < 1e-4
    assert_is_picture(tmp_path / "straggler.png")


def test_static_split_gives_the_numbers_of_one_device(tmp_path: Path) -> None:
    recipe = RECIPES / "static_split.py"
    pattern = r"test loss ([\d.]+)"
    speeds = ("--emulate-speeds", "4,2,1", "--emulate-ms-per-sample", 1)
    split = run(*LAUNCHER, *speeds, recipe, "--epochs", 2, cwd=tmp_path)
    alone = run(recipe, "--epochs", 2, cwd=tmp_path)
    assert "EMULATION" in split
    assert len(numbers(pattern, split)) == 1, "only the chief prints"
    assert numbers(pattern, split) == pytest.approx(numbers(pattern, alone), rel=1e-3)
    assert "EMULATION" not in alone


def test_slow_device_writes_a_log_of_each_run(tmp_path: Path) -> None:
    from keras_het.telemetry.event_log import read_log

    recipe, speeds = (
        RECIPES / "slow_device.py",
        ("--emulate-speeds", "4,1", "--emulate-ms-per-sample", 1),
    )
    for options in ((), ("--balance",)):
        text = run(*LAUNCHER, *speeds, recipe, "--epochs", 3, *options, cwd=tmp_path)
        assert len(numbers(r": ([\d.]+) samples/s in the last epoch", text)) == 1
    names = {found.name for found in read_log(tmp_path / "logs")}
    assert names == {"balanced/telemetry", "even/telemetry"}


def test_pipeline_trains_what_fits_no_device(tmp_path: Path) -> None:
    text = run(RECIPES / "pipeline.py", "--epochs", 1, cwd=tmp_path)
    assert "one device: does not fit" in text
    assert numbers(r"(?m)^(\d)  .* CPU:\d", text) == [0, 1, 2]


def test_pipeline_says_what_one_device_lacks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"CPU:0 lacks [\d.]+ MB"):
        run(RECIPES / "pipeline.py", "--devices", 1, cwd=tmp_path)


def test_custom_training_loop_gives_the_losses_of_one_device(tmp_path: Path) -> None:
    recipe = RECIPES / "custom_training_loop.py"
    pattern = r"epoch \d: loss ([\d.]+)"
    split = numbers(pattern, run(*LAUNCHER, "--workers", 2, recipe, "--epochs", 2, cwd=tmp_path))
    alone = numbers(pattern, run(recipe, "--epochs", 2, cwd=tmp_path))
    assert len(split) == 2
    assert split[1] < split[0]
    assert split == pytest.approx(alone, rel=1e-4)


def test_resume_gives_the_uninterrupted_weights(tmp_path: Path) -> None:
    text = run(RECIPES / "resume.py", cwd=tmp_path)
    assert "killed by SIGKILL" in text
    assert numbers(r"uninterrupted training: (\S+)", text)[0] < 1e-4


def test_elastic_continues_and_gives_the_weights_of_one_device(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: the extra `ray`")
    text = run(RECIPES / "elastic.py", cwd=tmp_path)
    assert re.search(r"worker 1 is killed after step \d+", text)
    assert numbers(r"(\d) workers continue at step \d+", text) == [3, 4]
    assert numbers(r"has ended after step (\d+)", text) == [600]
    assert numbers(r"Uses of a sample in 60 epochs: ([\d.]+) to", text) == [60]
    assert numbers(r"Uses of a sample in 60 epochs: \S+ to ([\d.]+)", text) == [60]
    assert numbers(r"training on one device: (\S+)", text)[0] < 1e-4


@pytest.fixture
def two_cpus() -> Iterator[int]:
    """What a test starts may use two CPUs, however many there are; returns how many it may."""
    if not hasattr(os, "sched_setaffinity"):
        yield os.cpu_count() or 1
        return
    allowed = os.sched_getaffinity(0)
    few = sorted(allowed)[:2]
    os.sched_setaffinity(0, few)
    yield len(few)
    os.sched_setaffinity(0, allowed)


@pytest.mark.alone
def test_tune_loader_keeps_the_device_busier(tmp_path: Path, two_cpus: int) -> None:
    text = run(RECIPES / "tune_loader.py", "--steps", 120, cwd=tmp_path)
    assert re.search(r"step \d+: \d+ loaders, prefetch \d+ \(device waits", text), "moves are shown"
    assert "knobs = keras_het.loader.Knobs(num_parallel_calls=" in text
    before, after = numbers(r"AUTOTUNE: +([\d.]+)", text)[0], numbers(r"Tuner: +([\d.]+)", text)[0]
    # AUTOTUNE cannot have more calls than cores: at most this many reads of 15 ms a second. Reads
    # that wait need no core, so that more threads than cores are faster however busy those are.
    assert before <= 1.1 * two_cpus / 0.015 / 16
    assert numbers(r"threads=(\d+)\)", text)[0] > two_cpus
    assert after > before
    assert after <= numbers(r"at most (\d+) steps/s", text)[0]
    assert_is_picture(tmp_path / "tune_loader.png")


@pytest.mark.alone
def test_hybrid(tmp_path: Path) -> None:
    text = run(RECIPES / "hybrid.py", cwd=tmp_path)
    rows = re.findall(
        r"│ (even split|left out|hybrid) +│ +[\d.]+ +│ +(\d+) +│ ([\d +]+?) +│ ([\d.]+) %",
        text,
    )
    assert [row[0] for row in rows] == ["even split", "left out", "hybrid"]
    group, slow = (int(count) for count in rows[2][2].split(" + "))
    assert group > slow > 0
    # counted when the last epoch ended for the group; the slow one may still have a batch
    assert 0.9 * 12 * 1437 < group + slow <= 12 * 1437
    accuracies = [float(row[3]) for row in rows]
    assert min(accuracies) > 90


def test_validate_data_finds_what_the_slow_worker_gets(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
    )
    speeds = ("--emulate-speeds", "4,1", "--emulate-ms-per-sample", 1)
    text = run(*LAUNCHER, *speeds, RECIPES / "validate_data.py", cwd=tmp_path)
    assert "x/maximum: Out-of-range values" in text
    assert "Steps trained: 0" in text
    # The fast worker gets digits 0 to 4 only, the slow one the others: a digit is a fifth of each.
    assert (
        numbers(r"label: L-infinity distance of replica 1 from replica 0 ([\d.]+)", text)[0] > 0.2
    )
    first, second = re.findall(r"the workers' data differs in: (.*)", text)
    assert "label" in first.split(", ")
    assert second == "nothing"
    written = sorted(path.name for path in (tmp_path / "validation").iterdir())
    assert written == ["one_after_the_other", "schema.pbtxt", "shuffled"]


def update_rules() -> Any:
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location("update_rules", RECIPES / "update_rules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["update_rules"] = module  # where its dataclass looks
    spec.loader.exec_module(module)
    return module


def test_each_setting_of_the_update_rules_makes_its_callback() -> None:
    recipe = update_rules()
    for setting in recipe.SETTINGS.values():
        recipe.callback(setting)


@pytest.mark.parametrize("rule", ["sync_easgd", "async_easgd"])
def test_update_rules(tmp_path: Path, rule: str) -> None:
    text = run(RECIPES / "update_rules.py", "--rule", rule, cwd=tmp_path)
    one_device, ours = (
        float(cells(f"│ {name} ", text)[2].rstrip(" %")) for name in ("one device", rule)
    )
    assert one_device > 96
    assert ours > one_device - 3  # one seed; benchmarks/results/update_rules.md has three
