"""`keras-het doctor`: each common fault of a set-up is made here, and found with its fix."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import fake_nvml
import pytest
from doctor_facts import (
    A100,
    ALONE,
    CPU_BUILD,
    CUDA_BUILD,
    GIB,
    GTX_750,
    NOT_OURS,
    RTX_5080,
    TWO,
    WITH_GPU,
    found,
    having,
    in_cluster,
    tf_config,
)
from fake_nvml import FakeNvml
from fake_nvml import Gpu as FakeGpu

from keras_het.launch.command_line import main
from keras_het.launch.doctor import cluster_checks, facts, links, machine_checks
from keras_het.launch.doctor.examination import plan_of, report_on, run_checks, show
from keras_het.launch.doctor.facts import (
    EXTRAS,
    FAULT,
    NOTE,
    OK,
    WARNING,
    Gpu,
    count_gpu_boards,
    list_gpus,
)
from keras_het.launch.doctor.links import Measurement
from keras_het.launch.doctor.tensorflow_facts import TensorFlowFacts, ask_tensorflow


def problem(given, check):
    (finding,) = (each for each in found(given, check) if each.level in (WARNING, FAULT))
    return finding


def is_well(given, check):
    return all(finding.level in (OK, NOTE) for finding in found(given, check))


# The common faults


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_another_backend(backend, tmp_path):
    finding = problem(having(ALONE, {"KERAS_BACKEND": backend}), "keras_backend")
    assert finding.level == FAULT and repr(backend) in finding.text
    assert "KERAS_BACKEND=tensorflow" in finding.fix
    # Keras's file counts where the variable is not set
    (tmp_path / "keras.json").write_text(json.dumps({"backend": backend}))
    environ = {"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path)}
    assert str(tmp_path / "keras.json") in problem(having(ALONE, environ), "keras_backend").text
    assert is_well(having(ALONE, {**environ, "KERAS_HOME": "/nowhere"}), "keras_backend")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'cluster': {}}", "not valid JSON"),
        (tf_config(TWO, index=2), "index is out of range"),
        (json.dumps({"cluster": TWO}), '"task": None'),
        (tf_config({"worker": ["a:1", "a:1"]}), "lists an address twice"),
        (tf_config({"worker": ["a", "b:1"]}), "bad address"),
        (tf_config({"workers": ["a:1"]}), "unknown job"),
    ],
    ids=["no JSON", "index", "no task", "twice", "no port", "job"],
)
def test_a_wrong_tf_config(text, words):
    given = in_cluster(text)
    finding = problem(given, "tf_config")
    assert finding.level == FAULT and words in finding.text and "TF_CONFIG" in finding.fix
    assert "refuse TF_CONFIG" in plan_of(given)


def test_a_port_that_is_taken(ports):
    host, _, port = ports[0].rpartition(":")
    given = in_cluster(tf_config({"worker": list(ports[:2])}))
    assert is_well(given, "own_address")
    with socket.create_server((host, int(port))):
        finding = problem(given, "own_address")
    assert finding.level == FAULT and ports[0] in finding.text and f"grep {port}" in finding.fix
    assert f"(process {os.getpid()})" in finding.text
    assert is_well(given, "own_address")
    cluster = {"worker": [ports[0]], "async": ["other:1"]}
    environ = {"KERAS_HET_SERVICE_ADDRESS": ports[1]}
    with socket.create_server(("127.0.0.1", int(ports[1].rpartition(":")[2]))):
        finding = problem(in_cluster(tf_config(cluster), environ), "own_address")
    assert "port of the parameter service is taken" in finding.text


def test_an_address_of_another_machine():
    text = tf_config({"worker": [f"{NOT_OURS}:12345", "127.0.0.1:1002"]})
    finding = problem(in_cluster(text), "own_address")
    assert finding.level == FAULT and "not one of this machine" in finding.text
    assert '"index"' in finding.fix
    kubernetes = in_cluster(text, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert problem(kubernetes, "own_address").level == WARNING


def test_hosts_that_nobody_knows(monkeypatch, ports):
    known = cluster_checks.places_of
    monkeypatch.setattr(
        cluster_checks, "places_of", lambda address: [] if "gone" in address else known(address)
    )
    finding = problem(in_cluster(tf_config({"worker": [ports[0], "gone:1"]})), "other_names")
    assert finding.level == FAULT and "worker 1" in finding.text and "getent" in finding.text
    mine = problem(in_cluster(tf_config({"worker": ["gone:1", ports[0]]})), "own_address")
    assert mine.level == FAULT and "this machine (worker 0)" in mine.text


def test_loopback_among_addresses_of_several_machines(ports):
    text = tf_config({"worker": [ports[0], f"{NOT_OURS}:1"]})
    finding = problem(in_cluster(text), "loopback")
    assert finding.level == FAULT and "This machine's own name" in finding.text
    text = tf_config({"worker": [f"{NOT_OURS}:1", ports[0]]})
    assert "The address of worker 1" in problem(in_cluster(text), "loopback").text
    assert is_well(in_cluster(tf_config({"worker": list(ports)})), "loopback")


def test_a_driver_that_is_missing(monkeypatch, tmp_path):
    board = tmp_path / "0000:01:00.0"
    board.mkdir()
    (board / "vendor").write_text("0x10de\n")
    (board / "class").write_text("0x030200\n")
    sound = tmp_path / "0000:01:00.1"
    sound.mkdir()
    (sound / "vendor").write_text("0x10de\n")
    (sound / "class").write_text("0x040300\n")
    assert count_gpu_boards(tmp_path) == 1
    module = FakeNvml(init_error=fake_nvml.LIBRARY_NOT_FOUND)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    listed = list_gpus()
    no_gpu = dataclasses.replace(CUDA_BUILD, gpus=(), replicas=0)
    given = having(ALONE, tensorflow=no_gpu, gpu_boards=1, **listed)
    finding = problem(given, "driver")
    assert "no driver that answers" in finding.text and "Install NVIDIA's driver" in finding.fix
    # without a board it is only said
    (said,) = found(dataclasses.replace(given, gpu_boards=0), "driver")
    assert said.level == NOTE and "no GPU" in said.text
    assert f"{said.text} {said.fix}".lower().count("install nvidia's driver") == 1


def test_what_a_driver_says(monkeypatch):
    part = FakeGpu("part", "MIG-1")
    module = FakeNvml(FakeGpu("card", "GPU-1", (part,), capability=(8, 6)))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert list_gpus() == {
        "gpus": (Gpu(0, "card", "GPU-1", (8, 6), 40 * GIB, GIB, 1),),
        "driver": "550.54.14",
        "driver_cuda": (12, 4),
    }
    assert module.opened == 0


def test_extras_exist_in_the_package():
    project = Path(__file__).parents[2] / "pyproject.toml"
    text = project.read_text().partition("optional-dependencies]")[2].partition("\n[")[0]
    names = re.findall(r"^([\w-]+) = \[", text, re.MULTILINE)
    assert set(EXTRAS) == set(names) - {"cuda", "dev"}


def test_little_shared_memory_for_nccl(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_checks, "SHARED_MEMORY", tmp_path)
    room = SimpleNamespace(free=64 * 2**20)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: room)
    finding = problem(having(WITH_GPU, gpus=(A100, RTX_5080)), "shared_memory")
    assert "64 MiB" in finding.text and "--shm-size" in finding.fix
    assert is_well(WITH_GPU, "shared_memory")  # one GPU exchanges with nobody


def test_a_folder_for_logs_that_is_full_or_forbidden(monkeypatch, tmp_path):
    assert is_well(having(ALONE, log_dir=tmp_path / "new" / "logs"), "room_for_logs")
    file = tmp_path / "file"
    file.write_text("")
    finding = problem(having(ALONE, log_dir=file / "logs"), "room_for_logs")
    assert finding.level == FAULT and str(file) in finding.text
    room = SimpleNamespace(free=10 * 2**20)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: room)
    full = [each for each in found(having(ALONE, log_dir=tmp_path), "room_for_logs") if each.fix]
    assert [each.level for each in full] == [WARNING, WARNING]  # and that for temporary files
    assert "--log-dir" in full[0].fix and "TMPDIR" in full[1].fix


def hiding(text, *gpus, **changes):
    return having(WITH_GPU, {"CUDA_VISIBLE_DEVICES": text}, gpus=gpus or (A100,), **changes)


def with_versions(**changes):
    return having(ALONE, tensorflow=dataclasses.replace(CPU_BUILD, **changes))


def using(*gpus, log=""):
    return dataclasses.replace(CUDA_BUILD, gpus=gpus, replicas=min(len(gpus), 1), log=log)


TENSORBOARD, NEWER = {"tensorboard": "2.20.0"}, {"tensorboard": "2.21.0"}
QUOTA = {"affinity": 64, "cpus": 2.0}
BUSY = dataclasses.replace(A100, used_bytes=30 * GIB)
WITH_ASYNC = tf_config({"worker": ["127.0.0.1:1001"], "async": ["other:1"]})
WITH_NODE = tf_config({"worker": ["127.0.0.1:1001", "node.lab:1"]})
PROXY = {"https_proxy": "http://proxy:3128"}
NO_LIBRARIES = "Cannot dlopen some GPU libraries."
SMALL = having(WITH_GPU, tensorflow=using("NVIDIA A100", "GT 1030"), gpus=(A100, GTX_750))
# the check that finds something, in which facts, what it says, and the fix
PROBLEMS = [
    ("extras", having(ALONE, extras=TENSORBOARD, has_pkg_resources=False),
     ["TensorBoard 2.20.0 cannot start"], "setuptools<82"),
    ("tensorflow_build", having(WITH_GPU, tensorflow=CPU_BUILD), ["knows no CUDA"],
     ".[cuda]"),
    ("kernels", having(WITH_GPU, gpus=(A100, GTX_750)),
     ["GPU 1 (GTX 750)", "capability 5.0", "out a GPU that is older"], ""),
    ("kernels", having(WITH_GPU, gpus=(A100, RTX_5080)),
     ["half an hour", "CUDA_ERROR_INVALID_PTX"], "CUDA_CACHE_MAXSIZE"),
    ("cpu_quota", having(ALONE, **QUOTA), ["2 CPUs", "64 threads"], "TF_NUM_INTRAOP_THREADS=2"),
    *(("hidden_gpus", hiding(text), ["see 0 of 1 GPUs"], "Unset")
      for text in ("", "-1", "7", "GPU-xyz")),
    # a wrong entry hides what comes behind it
    ("hidden_gpus", hiding("0,5,1", A100, RTX_5080), ["see 1 of 2 GPUs", "from 0 to 1"], ""),
    ("public_address", having(ALONE, public_addresses=("8.8.8.8",)), ["also on 8.8.8.8"],
     "firewall"),
    ("secret", in_cluster(WITH_ASYNC), ["neither"], ""),
    ("proxies", in_cluster(WITH_NODE, PROXY), ["node.lab"], "no_proxy=node.lab"),
    ("memory", having(ALONE, memory_used=63.5 * GIB), ["GiB"], ""),
    ("gpus_in_use", having(WITH_GPU, gpus=(BUSY,)), ["30.0 of 40 GiB"], ""),
    ("emulation", having(ALONE, {"KERAS_HET_EMULATED_DEVICES": "[]"}), [], "Unset it"),
    ("cpu_budget", having(WITH_GPU, cpus=1.0, affinity=1), ["feed 1 GPUs"], ""),
    ("used_gpus", having(WITH_GPU, tensorflow=using(log=NO_LIBRARIES)), [NO_LIBRARIES],
     "tensorflow[and-cuda]==2.21.0"),
    ("used_gpus", SMALL, [], "MULTIPROCESSOR"),
    ("versions", with_versions(tensorflow="2.15.1"), [], "pip install"),
    ("versions", with_versions(keras="2.15.0"), [], "pip install"),
    ("versions", with_versions(tensorflow="2.22.0-dev20261101"), [], "pip install"),
    ("versions", with_versions(keras="3.16.0"), [], "pip install"),
]  # fmt: skip
FAULTS = [with_versions(tensorflow="2.15.1"), with_versions(keras="2.15.0"), in_cluster(WITH_ASYNC)]


@pytest.mark.parametrize(("check", "given", "texts", "fix"), PROBLEMS)
def test_a_problem_is_printed_with_its_fix(check, given, texts, fix):
    finding = problem(given, check)
    assert [text for text in texts if text not in finding.text] == [] and fix in finding.fix
    if check in ("versions", "secret", "public_address"):
        assert finding.level == (FAULT if given in FAULTS else WARNING)


@pytest.mark.parametrize(
    ("check", "given"),
    [
        ("extras", having(ALONE, extras=TENSORBOARD)),
        ("extras", having(ALONE, extras=NEWER, has_pkg_resources=False)),
        # machine code of 8.0 runs on 8.6; "compute_90" has machine code of 9.0, too
        ("kernels", having(WITH_GPU, gpus=(dataclasses.replace(A100, capability=(8, 6)),))),
        ("kernels", having(WITH_GPU, gpus=(dataclasses.replace(A100, capability=(9, 0)),))),
        ("cpu_quota", having(ALONE, {"TF_NUM_INTRAOP_THREADS": "2"}, **QUOTA)),
        *(("hidden_gpus", hiding(text, A100, RTX_5080)) for text in ("0", "GPU-a,GPU-c", "1,0")),
        ("secret", in_cluster(WITH_ASYNC, {"KERAS_HET_SECRET": "s" * 16})),
        ("proxies", in_cluster(WITH_NODE, {**PROXY, "no_proxy": "localhost,.lab"})),
        ("proxies", in_cluster(WITH_NODE)),
    ],
)
def test_what_is_no_problem(check, given):
    assert is_well(given, check)


@pytest.mark.parametrize("given", [ALONE, WITH_GPU])
def test_a_machine_that_is_well_has_no_problem(given):
    assert all(finding.level in (OK, NOTE) for finding in run_checks(given))


def test_the_cpus_of_a_machine_are_divided_among_its_tasks():
    cluster = {"worker": ["a:1", "a:2", "a:3", "b:1"]}
    (budget,) = found(in_cluster(tf_config(cluster), cpus=6.0, affinity=6), "cpu_budget")
    assert budget.text == "CPUs: 6; 2 for each of 3 tasks on this machine."


def test_of_gpus_that_tensorflow_does_not_use_one_check_says_why():
    assert found(hiding("-1", tensorflow=using()), "used_gpus") == []
    (order,) = found(SMALL, "gpu_order")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in order.fix


# TensorFlow, in a separate process


@pytest.fixture
def package(tmp_path):
    """Writes packages that stand in for TensorFlow and Keras; returns the environment for them."""

    def write(tensorflow, keras="__version__ = '3.15.1'"):
        for name, source in (("tensorflow", tensorflow), ("keras", keras)):
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": path}

    return write


FAKE = """
    import sys
    from types import SimpleNamespace as Names
    __version__ = "2.21.0"
    sysconfig = Names(get_build_info=lambda: dict(
        is_cuda_build=True, cuda_version="12.5.1", cudnn_version="9",
        cuda_compute_capabilities=["sm_80", "compute_90"]))
    class OpError(Exception): pass
    errors = Names(OpError=OpError)
    def used(kind):
        sys.stderr.write("I0 00:00 1 runtime/gpu_device.cc:10] Ignoring visible gpu device\\n")
        sys.stderr.write("I0 00:00 1 core/util/port.cc:1] oneDNN custom operations are on.\\n")
        return [1]
    config = Names(
        list_physical_devices=lambda kind: [1, 2], list_logical_devices=used,
        experimental=Names(get_device_details=lambda device: {"device_name": f"card {device}"}))
"""


def test_tensorflow_is_asked(package):
    answer = ask_tensorflow({**package(FAKE), "KERAS_BACKEND": "torch", "TF_CONFIG": "no JSON"})
    assert answer == TensorFlowFacts(
        tensorflow="2.21.0",
        keras="3.15.1",
        cuda="12.5.1",
        cudnn="9",
        kernels=("sm_80", "compute_90"),
        gpus=("card 1", "card 2"),
        replicas=1,
        log="Ignoring visible gpu device",
    )


@pytest.mark.quick("numpy")
@pytest.mark.parametrize(
    ("source", "words", "fix"),
    [
        (
            "raise ImportError('numpy.core.multiarray failed to import')",
            "multiarray",
            "force-reinstall tensorflow numpy",
        ),
        ("raise TypeError('Descriptors cannot be created directly')", "Descr", "protobuf"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL", "AVX"),
        ("raise RuntimeError('something else')", "something else", "python -c"),
    ],
    ids=["numpy", "protobuf", "instructions", "else"],
)
def test_a_tensorflow_that_does_not_start_is_a_finding(package, source, words, fix):
    answer = ask_tensorflow(package(source))
    finding = problem(having(ALONE, tensorflow=answer), "tensorflow_import")
    assert finding.level == FAULT and words in finding.text and fix in finding.fix
    assert "Traceback" not in finding.text


def test_a_tensorflow_that_takes_for_ever(package):
    answer = ask_tensorflow(
        package("import threading; threading.Event().wait()"), timeout_seconds=0.5
    )
    assert "within 0.5 s" in answer.problem and answer.fix


# The report and the command


@pytest.mark.parametrize(
    ("cluster", "task", "expected"),
    [
        (TWO, "worker", "train in a sync group of 2 workers, with 1 replica on CPU"),
        ({**TWO, "async": ["c:1"]}, "async", "train asynchronously"),
        ({**TWO, "async": ["c:1"], "ps": ["d:1"]}, "ps", "serve the others"),
        ({**TWO, "summation": ["c:1"]}, "summation", "serve the others"),
        (TWO, "evaluator", "evaluate"),
    ],
)
def test_what_it_would_do(cluster, task, expected):
    assert expected in plan_of(in_cluster(tf_config(cluster, task)))
    assert plan_of(WITH_GPU) == "Train alone, with 1 replica on GPU; input on 8 CPUs."


class AsciiTerminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


def test_the_report_for_people(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    given = having(ALONE, {"KERAS_BACKEND": "jax"}, processor="Prozeßor")
    report = report_on(given, run_checks(given), Measurement())
    plain, coloured = io.StringIO(), AsciiTerminal()
    show(report, plain)
    show(report, coloured)
    lines = plain.getvalue().splitlines()
    assert lines[0] == "keras-het doctor on here (Prozeßor)"
    assert "(Proze?or)" in coloured.getvalue()
    (line,) = (line for line in lines if line.startswith("fault"))
    assert "needs the TensorFlow backend" in line and line.endswith("'tensorflow'.")
    assert lines[lines.index(line) + 1].strip().startswith("fix: Set KERAS_BACKEND")
    assert lines[-1] == "Training would fail: faults: 1, warnings: 0."
    assert "\x1b[" not in plain.getvalue() and "\x1b[1;31mfault" in coloured.getvalue()
    assert not any(line.endswith(" ") for line in lines)


@pytest.fixture
def this_machine(monkeypatch):
    """What is not asked again: TensorFlow."""
    monkeypatch.setattr(facts, "ask_tensorflow", lambda environ: CPU_BUILD)
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_the_command(this_machine, capsys, monkeypatch, tmp_path):
    assert main(["doctor", "--log-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "TensorFlow 2.21.0" in output and "keras_het would: Train alone" in output
    assert str(tmp_path) in output
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"] == 1
    (fault,) = (finding for finding in report["findings"] if finding["level"] == FAULT)
    assert fault["check"] == "keras_backend" and fault["section"] == "Software" and fault["fix"]
    assert report["tensorflow"]["keras"] == "3.15.1" and report["cpus"] > 0


def test_a_node_that_cannot_serve_measures_nothing(this_machine, capsys, monkeypatch, ports):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": [f"{NOT_OURS}:12345", ports[0]]}))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    counts = collections.Counter(finding["check"] for finding in report["findings"])
    assert counts["own_address"] == counts["links"] == 1
    assert report["links"][0]["reached"] == links.REFUSED


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_wrong_usage(text, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--wait-seconds", text])
    assert f"received '{text}'" in capsys.readouterr().err


def test_the_command_line_does_not_import_tensorflow():
    program = (
        "import sys, keras_het.launch.command_line as c, "
        "keras_het.launch.doctor.examination, keras_het.launch.doctor.links; c.make_parser(); "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def listed(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    given = having(WITH_GPU, **list_gpus())
    assert module.opened == 0
    return given


def test_each_card_is_named(monkeypatch):
    module = FakeNvml(
        FakeGpu("H100", "GPU-a", capability=(9, 0)),
        FakeGpu("V100", "GPU-b", (FakeGpu(uuid="MIG-1"),), capability=(7, 0)),
    )
    given = listed(monkeypatch, module)
    (driver,) = found(given, "driver")
    assert "driver 550.54.14 answers" in driver.text and "for CUDA up to 12.4" in driver.text
    assert "TensorFlow is built for CUDA 12.5.1" in driver.text
    first, second = (finding.text for finding in found(given, "cards"))
    assert first == "GPU 0: H100, compute capability 9.0, 40 GiB."
    assert second.endswith("7.0, 40 GiB, divided into 1 parts (MIG).")


def test_a_driver_that_says_little():
    unknown = dataclasses.replace(GTX_750, capability=(0, 0))
    given = having(WITH_GPU, gpus=(unknown,), tensorflow=TensorFlowFacts())
    (driver,), (card,) = found(given, "driver"), found(given, "cards")
    assert driver.text == "NVIDIA's driver 550.54 answers (NVML); GPUs: 1."
    assert "compute capability unknown" in card.text


@pytest.mark.parametrize(
    ("capabilities", "is_told"),
    [([(8, 0), (7, 5)], True), ([(8, 0), (9, 0)], False), ([(8, 0), (0, 0)], False)],
)
def test_cards_of_which_some_have_tensor_float_32(capabilities, is_told):
    gpus = [
        dataclasses.replace(A100, index=index, name=f"card {index}", capability=capability)
        for index, capability in enumerate(capabilities)
    ]
    said = found(having(WITH_GPU, gpus=tuple(gpus)), "tensor_float_32")
    assert [each.level for each in said] == [NOTE] * is_told
    for each in said:
        assert "on GPU 0 (card 0), and not on GPU 1 (card 1)" in each.text and "1e-3" in each.text
        assert "enable_tensor_float_32_execution(False)" in each.fix
