"""Whether NCCL is asked for, tried and remembered; with fakes in place of GPUs."""

import json
import os
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.cluster import nccl
from keras_het.strategy.cluster.nccl import Implementation

OPTIONS = private_api.CommunicationOptions


@pytest.mark.parametrize(
    ("device_type", "implementation", "is_cuda_build", "expected"),
    [
        ("GPU", Implementation.AUTO, True, True),
        ("GPU", Implementation.AUTO, False, False),
        ("GPU", Implementation.RING, True, False),
        ("GPU", Implementation.NCCL, True, True),  # the first sum has a limit then, too
        ("CPU", Implementation.AUTO, True, False),
    ],
)
def test_who_wants_it(monkeypatch, device_type, implementation, is_cuda_build, expected):
    info = {"is_cuda_build": is_cuda_build}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: info)
    assert nccl.is_wanted(device_type, OPTIONS(implementation=implementation)) is expected


def test_other_options_stay():
    options = OPTIONS(bytes_per_pack=1000, timeout_seconds=5.0)
    found = nccl.with_implementation(options, Implementation.NCCL)
    assert (found.bytes_per_pack, found.timeout_seconds) == (1000, 5.0)
    assert found.implementation == Implementation.NCCL


@pytest.mark.parametrize(("others", "expected"), [(["a", "c"], True), (["c", "d"], False)])
def test_workers_that_share_a_gpu(monkeypatch, others, expected):
    gathered = []

    def gather(own):
        gathered.append(own)
        return np.concatenate(gathered)

    for names in (others, ["a", "b"]):
        monkeypatch.setattr(nccl, "identities", lambda devices, names=names: names)
        found = nccl.share_a_gpu(["GPU:0", "GPU:1"], gather)
    assert found is expected


ADDRESSES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth1": "10.0.0.7"}


@pytest.mark.parametrize(
    ("address", "given", "expected"),
    [
        ("10.0.0.7:2222", None, "eth1"),
        ("10.0.0.7:2222", "ib0", "ib0"),
        ("127.0.0.1:2222", None, None),
        ("10.9.9.9:2222", None, None),
        ("no.such.host.invalid:2222", None, None),
    ],
)
def test_the_interface_is_that_of_tf_config(monkeypatch, address, given, expected):
    found = {name: [SimpleNamespace(address=own)] for name, own in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv(nccl.INTERFACE, given or "")
    if given is None:
        monkeypatch.delenv(nccl.INTERFACE)
    nccl.choose_interface(address)
    assert os.environ.get(nccl.INTERFACE) == expected


def test_the_first_sum(monkeypatch):
    monkeypatch.setenv(nccl.INTERFACE, "eth1")
    ended = []
    nccl.check_answers(lambda: None, ended.append)
    assert not ended

    def fails():
        raise tf.errors.InternalError(None, None, "unhandled system error\nmore of it")

    with pytest.raises(RuntimeError, match=r"Received: unhandled system error; NCCL uses .* eth1"):
        nccl.check_answers(fails, ended.append)
    assert not ended  # the others have failed too

    waits = threading.Event()
    with pytest.raises(RuntimeError, match=r"Received: no answer within 0\.1 s; .*[.]RING"):
        nccl.check_answers(lambda: waits.wait(60), ended.append, seconds=0.1)
    waits.set()
    assert len(ended) == 1


@pytest.fixture
def python(monkeypatch, tmp_path):
    """An interpreter that does what its script says, and counts its starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(nccl, "identities", lambda devices: [f"GPU-{name}" for name in devices])
    path = tmp_path / "python"

    def does(script):
        path.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/starts\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(nccl.sys, "executable", str(path))

    return SimpleNamespace(does=does, starts=tmp_path / "starts", cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("script", "expected", "why"),
    [
        ("exit 0", True, ""),
        ("echo NCCL: Cuda failure >&2; exit 1", False, "(NCCL: Cuda failure)"),
        ("exec sleep 60", False, "(no answer within 0.5 s)"),
    ],
)
def test_unlike_gpus_are_tried_once(python, caplog, script, expected, why):
    python.does(script)
    for _ in range(2):
        assert nccl.joins(["GPU:0", "GPU:1"], seconds=0.5 if "sleep" in script else 60) is expected
    assert python.starts.read_text().splitlines() == [
        "-m keras_het.strategy.cluster.nccl GPU:0 GPU:1"
    ]
    assert why in caplog.text
    (remembered,) = (python.cache / "keras_het").iterdir()
    assert (f"Delete {remembered} to try again" in caplog.text) is not expected
    assert json.loads(remembered.read_text()) is expected
    python.does("exit 0")
    assert nccl.joins(["GPU:1", "GPU:2"]) is True  # others are tried by themselves


def test_a_trial_that_lacks_memory_is_repeated_at_the_next_start(python, caplog):
    python.does("echo CUDA_ERROR_OUT_OF_MEMORY >&2; exit 1")
    assert not nccl.joins(["GPU:0", "GPU:1"])
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in caplog.text
    python.does("exit 0")
    assert nccl.joins(["GPU:0", "GPU:1"])


@pytest.mark.full
def test_the_program_fails_where_there_is_no_gpu():
    command = [sys.executable, "-m", "keras_het.strategy.cluster.nccl", "GPU:0", "GPU:1"]
    ended = subprocess.run(command, capture_output=True, timeout=120, check=False, text=True)
    assert ended.returncode == 1, ended.stderr
