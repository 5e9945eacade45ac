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


def test_without_cgroups_the_host_counts(tmp_path):
    assert available_memory(tmp_path / "none", tmp_path / "nothing") == HOST


UNLIMITED = 9223372036854771712
CLEAN = "anon 80\ninactive_file 70\nactive_file 50\n"
TOTAL = "inactive_file 1\ntotal_inactive_file 20\n"


@pytest.mark.parametrize(
    ("groups", "text", "expected"),
    [
        pytest.param({"own": (500, 200)}, "0::/own\n", 300, id="what the limit leaves"),
        pytest.param({"own": (500, 600)}, "0::/own\n", 0, id="more than the limit"),
        pytest.param({"own": (500, 200, CLEAN)}, "0::/own\n", 370, id="unused files"),
        pytest.param({"own": ("max", 200)}, "0::/own\n", HOST, id="max"),
        pytest.param({"own": ("nonsense", 200)}, "0::/own\n", HOST, id="nonsense"),
        pytest.param({"own": (10**18, 200)}, "0::/own\n", HOST, id="above the host"),
        pytest.param(
            {"pod": (600, 500), "pod/own": (500, 200)}, "0::/pod/own\n", 100, id="groups around"
        ),
        pytest.param(
            {"memory/own": (500, 200, TOTAL, 1)},
            "3:cpu,cpuacct:/else\n2:memory:/own\n0::/\n",
            320,
            id="version 1",
        ),
        pytest.param(
            {"memory/own": (UNLIMITED, 200, "", 1)}, "2:memory:/own\n", HOST, id="version 1, none"
        ),
        pytest.param({"": (400, 100)}, "0::/docker/1a2b\n", 300, id="in a container"),
    ],
)
def test_limits_of_groups_bound_the_memory(groups, text, expected, tmp_path):
    for folder, values in groups.items():
        group(tmp_path / folder, *values)
    path = tmp_path / "membership"
    path.write_text(text)
    assert available_memory(tmp_path, path) == expected


def test_this_process_has_memory(monkeypatch):
    monkeypatch.undo()
    assert 0 < available_memory() <= psutil.virtual_memory().total
