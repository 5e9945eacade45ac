"""`keras-het run --ray`: what it refuses, what it asks of Ray, and how it ends."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from keras_het.launch.command_line import main


@pytest.fixture
def ray_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def asked(monkeypatch):
    """Stands in for the training on Ray, which ends with an error or without."""
    script = pytest.importorskip("keras_het.ray.trainer", reason="needs Ray: the extra `ray`")

    def end_with(error):
        calls: list[Any] = []

        def run_on_ray(*arguments):
            calls.append(arguments)
            if error is not None:
                raise error

        monkeypatch.setattr(script, "run_on_ray", run_on_ray)
        return calls

    return end_with


def test_a_script_is_given_to_ray_with_its_arguments(asked, ray_script):
    calls = asked(None)
    options = ["--workers", "2:4", "--resources", "het=1,CPU=0.5"]
    assert main(["run", "--ray", "head:6379", *options, ray_script, "--epochs", "3"]) == 0
    assert calls == [([ray_script, "--epochs", "3"], (2, 4), "head:6379", {"het": 1.0, "CPU": 0.5})]


OF_KERAS = """Traceback (most recent call last):
  File "train.py", line 4, in call
ValueError: Exception encountered when calling L.call().

no

Arguments received by L.call():
  • training=True"""


def test_the_last_line_is_the_cause(asked, ray_script, capsys):
    import keras_het.ray

    asked(keras_het.ray.TrainFunctionError(OF_KERAS))
    assert main(["run", "--ray", "--workers", "2", ray_script]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "[keras-het] a worker failed: ValueError: in L.call(): no (train.py:4)"


@pytest.mark.parametrize(
    ("make_error", "exit_code", "last_line"),
    [
        ("TrainFunctionError", 1, "KeyError: 'no'"),
        ("MaxFailuresExceededError", 1, "KeyError: 'no'"),
        ("ConnectionError", 1, "To start a cluster on this machine: ray start --head"),
        # Ray's handler of SIGINT
        ("SystemExit", 130, "continues from the newest backup of ElasticBackup."),
    ],
)
def test_exit_codes(asked, ray_script, capsys, make_error, exit_code, last_line):
    import keras_het.ray

    kind = getattr(keras_het.ray, make_error, getattr(builtins, make_error, None))
    asked(kind("KeyError: 'no'"))
    assert main(["run", "--ray", "--workers", "2", ray_script]) == exit_code
    assert capsys.readouterr().err.rstrip().endswith(last_line)


def test_without_ray_it_says_what_to_install(monkeypatch, capsys, ray_script):
    for name in [each for each in sys.modules if each.startswith("keras_het.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "--ray", "--workers", "2", ray_script]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        *(
            ["--emulate-speeds", "2,1"],
            ["--gpus", "auto"],
            ["--hosts", "a,b"],
            ["--pin"],
            ["--only-chief"],
        ),
        *(["--cpus-per-worker", "1"], ["--log-dir", "logs"], ["--pass-env", "A"], ["--tf-logs"]),
        ["--python", "python3"],
    ],
)
def test_what_ray_decides_is_refused(capsys, ray_script, option):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--ray", "--workers", "2", *option, ray_script])
    assert ended.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_the_number_of_workers_is_needed(capsys, ray_script):
    with pytest.raises(SystemExit):
        main(["run", "--ray", "head:6379", ray_script])
    assert "--workers 2:4" in capsys.readouterr().err
