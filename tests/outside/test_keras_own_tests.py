"""Keras's own tests of distribution, from its wheel, with our strategy in place of TensorFlow's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

# Module, how many strategies it must build at least, how many tests must pass at least.
MODULES = [
    ("keras.src.backend.tensorflow.distribute_test", 7, 7),
    ("keras.src.backend.tensorflow.optimizer_distribute_test", 9, 9),
    ("keras.src.callbacks.swap_ema_weights_test", 1, 4),
    # Builds none of its own in Keras 3.15; a later one may.
    ("keras.src.optimizers.multi_optimizer_test", 0, 10),
]


def run_with_our_strategy(module: str, report: Path) -> tuple[dict, str]:
    """Runs a test module of an installed package in a separate process.

    These tests reset TensorFlow's context, which no other test of the process would survive.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(REPOSITORY)]),
        "SWAPPED_STRATEGY_REPORT": str(report),
    }
    command = [sys.executable, "-m", "pytest", "--pyargs", module, "-p", "swapped_strategy"]
    command += ["-q", "--noconftest", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
    process = subprocess.run(
        command,
        env=environment,
        cwd=report.parent,
        timeout=280,
        capture_output=True,
        text=True,
        check=False,
    )
    output = process.stdout[-8000:] + process.stderr[-4000:]
    assert report.exists(), output
    return json.loads(report.read_text()), output


@pytest.mark.parametrize(("module", "built", "passed"), MODULES, ids=lambda v: str(v))
def test_module_passes_with_our_strategy(module, built, passed, tmp_path):
    report, output = run_with_our_strategy(module, tmp_path / "report.json")
    outcomes = list(report["outcomes"].values())
    assert "failed" not in outcomes, output
    assert outcomes.count("passed") >= passed, output
    assert len(report["built"]) >= built, "our strategy was not built"
    assert all(devices == ["CPU:0", "CPU:1"] for devices in report["built"])


def test_a_failing_test_is_noticed(tmp_path):
    (tmp_path / "failing_module.py").write_text(
        "import tensorflow as tf\n"
        "def test_that_fails():\n"
        "    assert 'Mirrored' in type(tf.distribute.MirroredStrategy(['CPU:0'])).__name__\n"
    )
    report, output = run_with_our_strategy("./failing_module.py", tmp_path / "report.json")
    assert list(report["outcomes"].values()) == ["failed"], output
    assert report["built"] == [["CPU:0"]]
