"""A worker for each GPU: which GPUs there are, which are chosen, and what each worker gets."""

import sys

import pytest
from fake_nvml import DRIVER_NOT_LOADED, FakeNvml, Gpu

from keras_het.launch.command_line import main
from keras_het.launch.local.worker_environment import choose_gpus, deal_gpus, present_gpus

PRESENT = ["GPU-a", "GPU-b", "GPU-cc"]
DIVIDED = Gpu(uuid="GPU-d", parts=(Gpu(uuid="MIG-1"), Gpu(uuid="MIG-2")))


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("auto", PRESENT),
        ("2", PRESENT[:2]),
        ("0,2", ["GPU-a", "GPU-cc"]),
        ("2,", ["GPU-cc"]),
        ("GPU-b,GPU-c", ["GPU-b", "GPU-cc"]),
    ],
)
def test_some_of_the_gpus_are_chosen(wanted, chosen):
    assert choose_gpus(wanted, PRESENT) == chosen


@pytest.mark.parametrize(
    ("wanted", "present", "message"),
    [
        ("auto", [], "--gpus auto, where no GPU can be used here"),
        ("0", PRESENT, "--gpus 0, where 3"),
        ("4", PRESENT, r"--gpus 4, where 3 GPU\(s\) \(GPU-a, GPU-b, GPU-cc\) can be used here"),
        ("0,3", PRESENT, "--gpus 0,3"),
        ("GPU-", PRESENT, "expected: auto, a number, or indices such as 0,2"),
        ("all", PRESENT, "--gpus all"),
        ("", PRESENT, "See `keras-het doctor`"),
        ("1,1", PRESENT, "its own GPU. Received: --gpus 1,1"),
    ],
)
def test_gpus_that_cannot_be_chosen(wanted, present, message):
    with pytest.raises(ValueError, match=message):
        choose_gpus(wanted, present)


def test_parts_of_a_divided_gpu_take_its_place():
    module = FakeNvml(Gpu(uuid="GPU-a"), DIVIDED)
    assert present_gpus({}, module) == ["GPU-a", "MIG-1", "MIG-2"]
    assert module.opened == 0


@pytest.mark.parametrize(
    ("visible", "present"), [("1, GPU-x", ["1", "GPU-x"]), ("", []), ("2,-1,3", ["2"]), ("-1", [])]
)
def test_what_the_environment_leaves_is_not_asked_of_the_driver(visible, present):
    module = FakeNvml(init_error=DRIVER_NOT_LOADED)
    assert present_gpus({"CUDA_VISIBLE_DEVICES": visible}, module) == present


def test_local_workers_divide_the_gpus():
    three = {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert deal_gpus(three, 2, 1, False) == ["0,3", "2"]
    assert deal_gpus(three, 4, 1, False) == ["0", "2", "3", ""]
    assert deal_gpus(three, 4, 0, False) == [""] * 4
    assert deal_gpus({"CUDA_VISIBLE_DEVICES": ""}, 2, 0, False) == []


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    names = ["CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"]
    path.write_text(f"import os\nprint('sees', *(os.environ[name] for name in {names}))\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "seen", "message"),
    [
        (
            ["--gpus", "auto"],
            ["GPU-a true", "MIG-1 true", "MIG-2 true"],
            "worker 2 sees GPU MIG-2 only.",
        ),
        (
            ["--workers", "2"],
            ["GPU-a true", "MIG-1 true"],
            "worker 0 sees GPU GPU-a only.",
        ),
        (
            ["--workers", "4"],
            [" true"] * 4,
            "the workers see no GPU, as there are fewer GPUs than workers",
        ),
        (
            ["--emulate-speeds", "2,1"],
            [" true"] * 2,
            "the workers see no GPU, as devices are emulated",
        ),
    ],
    ids=["one each", "dealt", "too few", "emulated"],
)
def test_local_workers_share_no_gpu(script, monkeypatch, capfd, arguments, seen, message):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(uuid="GPU-a"), DIVIDED))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["run", *arguments, str(script)]) == 0
    output = capfd.readouterr().out
    assert message in output
    for index, names in enumerate(seen):
        assert f"[worker {index}] sees {names}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["3"], "--gpus: there are no such GPUs. Received: --gpus 3, where 2 GPU(s)"),
        (["auto", "--async-workers", "2"], "--gpus: no worker is left for the synchronous group"),
        (["auto", "--workers", "3"], "--gpus starts one worker for each GPU: leave out --workers"),
        (["auto", "--emulate-speeds", "2,1"], "--gpus starts one worker for each GPU"),
    ],
)
def test_mistakes_are_one_line(script, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert code_of(["run", "--gpus", *arguments, str(script)]) == 2
    assert message in capsys.readouterr().err


def test_without_a_driver_the_fix_is_printed(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=DRIVER_NOT_LOADED))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert code_of(["run", "--gpus", "auto", str(script)]) == 2
    assert "--gpus: NVIDIA's management library does not answer" in capsys.readouterr().err


def code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as exit:
        return int(exit.code or 0)
