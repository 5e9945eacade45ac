"""Memory limits of containers are seen."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from keras_het.loader.host import cpus as host_memory
from keras_het.loader.host.cpus import available_memory

HOST = 1000


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST)
    )


def group(folder, limit, used, stat="", version=2):
    names = {
        2: ("memory.max", "memory.current"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    }[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(stat)


def available(tmp_path, text="0::/own\n"):
    path = tmp_path / "membership"
    path.write_text(text)
    return available_memory(tmp_path, path)


def test_without_cgroups_the_host_counts(tmp_path):
    assert available_memory(tmp_path / "none", tmp_path / "nothing") == HOST


def test_what_the_limit_leaves(tmp_path):
    group(tmp_path / "own", 500, 200)
    assert available(tmp_path) == 300


def test_files_that_nobody_uses_are_given_back(tmp_path):
    group(tmp_path / "own", 500, 200, "anon 80\ninactive_file 70\nactive_file 50\n")
    assert available(tmp_path) == 370


@pytest.mark.parametrize("limit", ["max", "nonsense", 10**18])
def test_without_a_limit_the_host_counts(tmp_path, limit):
    group(tmp_path / "own", limit, 200)
    assert available(tmp_path) == HOST


def test_the_groups_around_count_too(tmp_path):
    group(tmp_path / "pod", 600, 500)
    group(tmp_path / "pod" / "own", 500, 200)
    assert available(tmp_path, "0::/pod/own\n") == 100


def test_version_1(tmp_path):
    stat = "inactive_file 1\ntotal_inactive_file 20\n"
    group(tmp_path / "memory" / "own", 500, 200, stat, version=1)
    assert available(tmp_path, "3:cpu,cpuacct:/else\n2:memory:/own\n0::/\n") == 320


def test_version_1_without_a_limit(tmp_path):
    group(tmp_path / "memory" / "own", 9223372036854771712, 200, version=1)
    assert available(tmp_path, "2:memory:/own\n") == HOST


def test_in_a_container_the_root_is_the_own_group(tmp_path):
    group(tmp_path, 400, 100)
    assert available(tmp_path, "0::/docker/1a2b\n") == 300


def test_more_than_the_limit_is_nothing(tmp_path):
    group(tmp_path / "own", 500, 600)
    assert available(tmp_path) == 0


def test_this_process_has_memory(monkeypatch):
    monkeypatch.undo()
    assert 0 < available_memory() <= psutil.virtual_memory().total
