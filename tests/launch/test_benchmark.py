"""`keras-het benchmark`: which trials, what they show, and a whole one on emulated devices."""

import io
import json
import subprocess
from types import SimpleNamespace

import pytest

from keras_het.launch import benchmark_command
from keras_het.launch.benchmark_trials import (
    Device,
    Settings,
    Trial,
    draw,
    headline,
    plan,
    run_trial,
    show,
)
from keras_het.launch.command_line import main
from keras_het.launch.doctor.facts import Facts
from keras_het.launch.doctor.tensorflow_facts import TensorFlowFacts

GPUS = (Device("0: RTX 3090", "GPU-a"), Device("1: RTX 2080 Ti", "GPU-b"))
EMULATED = (Device("emulated, speed 2", speed=2.0), Device("emulated, speed 1", speed=1.0))
SPEEDS = {"plain": 60.0, "even": 80.0, "balanced": 108.0, "copies": 90.0}


def measured(samples_per_second):
    return {
        "samples_per_second": samples_per_second,
        "step_seconds": 0.5,
        "steps": 30,
        "shares": [80, 48],
        "peak_mib": [9],
        "xla": True,
        "copies_per_step": [0, 1],
    }


def all_measured(settings):
    return {trial: measured(SPEEDS[trial.mode]) for trial in plan(settings)}


def test_each_device_alone_and_then_all():
    modes = [(trial.mode, trial.devices) for trial in plan(Settings(GPUS, ("convnet",)))]
    together = [(mode, (0, 1)) for mode in ("even", "balanced", "copies")]
    assert modes == [("plain", (0,)), ("plain", (1,)), *together]
    modes = [trial.mode for trial in plan(Settings(EMULATED, ("convnet", "transformer")))]
    assert modes == ["plain", "plain", "even", "balanced"] * 2
    assert [trial.mode for trial in plan(Settings(GPUS[:1], ("convnet",)))] == ["plain", "balanced"]


def test_the_headline():
    settings = Settings(GPUS, ("convnet",))
    found = all_measured(settings)
    assert headline("convnet", found) == {
        "over_sum_of_all_alone": pytest.approx(0.9),
        "over_best_alone": pytest.approx(1.8),
        "over_even": pytest.approx(1.35),
    }
    *_, without_nccl = plan(settings)
    found[without_nccl] = {"error": "no time was left"}
    assert headline("convnet", found)["over_even"] == pytest.approx(1.35)
    found[plan(settings)[1]] = {"error": "OOM"}
    assert headline("convnet", found) is None


@pytest.mark.parametrize(
    ("settings", "trial", "expected", "visible"),
    [
        (Settings(GPUS), Trial("convnet", "plain", (1,)), ("plain", ["GPU:0"], 64), "GPU-b"),
        (
            Settings(GPUS, batch_size=32),
            Trial("convnet", "copies", (0, 1)),
            ("copies", ["GPU:0", "GPU:1"], 64),
            "GPU-a,GPU-b",
        ),
        (Settings(EMULATED), Trial("convnet", "plain", (1,)), ("even", ["CPU:1"], 64), "-1"),
    ],
)
def test_what_a_process_gets(settings, trial, expected, visible):
    def run(module, environ, seconds, request):
        given = json.loads(request)
        assert (given["mode"], given["devices"], given["batch_size"]) == expected
        assert environ["CUDA_VISIBLE_DEVICES"] == visible
        if settings.is_emulated:
            (device,) = json.loads(environ["KERAS_HET_EMULATED_DEVICES"])
            assert device == {"speed": 1.0, "fixed_seconds": 0.0, "seconds_per_sample": 0.004}
        return SimpleNamespace(stdout="", stderr="first\nlast\n", returncode=1)

    assert run_trial(trial, settings, run=run) == {"error": "last"}


def test_a_trial_that_hangs():
    def run(module, environ, seconds, request):
        raise subprocess.TimeoutExpired(module, seconds)

    trial, settings = Trial("convnet", "plain", (0,)), Settings(GPUS, seconds=5.0)
    assert run_trial(trial, settings, run=run) == {"error": "not done within 200 s"}
    assert run_trial(trial, settings, 70.0, run) == {"error": "not done within 70 s"}
    assert "no time was left" in run_trial(trial, settings, 4.0, run)["error"]


def test_the_table_and_the_picture(tmp_path):
    settings = Settings(GPUS, ("convnet", "transformer"))
    found = all_measured(settings)
    found[plan(settings)[0]]["copies_per_step"] = []
    found[plan(settings)[-1]] = {"error": "out of memory"}
    output = io.StringIO()
    show(settings, found, output)
    text = output.getvalue()
    assert "0.90 of the sum of all alone, 1.80 times the fastest alone, 1.35 times even" in text
    assert (
        "all, balanced, without NCCL failed: out of memory" in text and "0: RTX 3090 alone" in text
    )
    cells = [cell.strip() for cell in text.split("│")]
    assert "0 or 1" in cells and "-" in cells
    path = draw(tmp_path, settings, found)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_gpus_are_found_and_nothing_about_the_machine_is_printed(monkeypatch, tmp_path, capsys):
    tensorflow = TensorFlowFacts(tensorflow="2.21.0", keras="3.15.1", gpus=("RTX 3090", "T4"))
    facts = Facts(host="secret-name", processor="EPYC", driver="580", tensorflow=tensorflow)
    monkeypatch.setattr(benchmark_command, "gather", lambda: facts)
    monkeypatch.setattr(benchmark_command, "present_gpus", lambda: ["GPU-a", "GPU-b"])
    asked, left = [], []

    def run_trial(trial, settings, seconds_left):
        asked.append(settings)
        left.append(seconds_left)
        return measured(SPEEDS[trial.mode])

    monkeypatch.setattr("keras_het.launch.benchmark_command.run_trial", run_trial)
    assert main(["benchmark", "--models", "convnet", "--output", str(tmp_path)]) == 0
    assert left == sorted(left, reverse=True) and 500 < left[0] < 600
    assert asked[0].devices == (Device("0: RTX 3090", "GPU-a"), Device("1: T4", "GPU-b"))
    text = (tmp_path / "keras-het-benchmark.json").read_text()
    content = json.loads(text)
    assert "secret-name" not in text and "GPU-a" not in text
    assert content["headline"]["convnet"]["over_even"] == pytest.approx(1.35)
    assert "Written:" in capsys.readouterr().out


def test_models_that_there_are_not(capsys):
    with pytest.raises(SystemExit):
        main(["benchmark", "--models", "gan"])
    assert "expected convnet,transformer, received 'gan'" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_a_whole_benchmark(tmp_path, model):
    given = ["--models", model, "--seconds", "1", "--emulate", "2,1", "--output", str(tmp_path)]
    assert main(["benchmark", *given]) == 0
    content = json.loads((tmp_path / "keras-het-benchmark.json").read_text())
    assert content["is_emulated"] and len(content["trials"]) == 4
    balanced = next(each for each in content["trials"] if each["mode"] == "balanced")
    assert all(each["copies_per_step"] for each in content["trials"])
    assert balanced["shares"][0] > balanced["shares"][1] and sum(balanced["shares"]) == 16
