"""CPU quotas and memory limits of containers are seen, and what is idle within them."""

import itertools
import math
import os
import time
from types import SimpleNamespace

import psutil
import pytest

from keras_het.loader.host_threads import IdleCpus, available_memory
from keras_het.usable_cpus import own_quotas, usable_cpus

AFFINITY = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def membership(tmp_path, text):
    path = tmp_path / "membership"
    path.write_text(text)
    return path


@pytest.fixture
def nobody_works(monkeypatch):
    """A host all of whose CPUs are idle, whatever this one does."""

    def seconds(cpus):
        return 0.0, time.monotonic() * len(cpus)

    monkeypatch.setattr("keras_het.loader.host_threads.busy_and_idle_seconds", seconds)


def test_without_cgroups_the_affinity_counts(tmp_path):
    assert usable_cpus(tmp_path / "none", tmp_path / "nothing") == AFFINITY


def quota_files(quota, version=2):
    """The files of a group with a quota in microseconds of 100 ms."""
    if version == 2:
        return {"cpu__max": f"{quota} 100000\n"}
    return {"cpu__cfs_quota_us": quota, "cpu__cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "text", "expected"),
    [
        pytest.param({"own": quota_files("50000")}, "0::/own\n", 0.5, id="version 2"),
        pytest.param({"own": quota_files("max")}, "0::/own\n", AFFINITY, id="no quota"),
        pytest.param({"own": {"cpu__max": "many\n"}}, "0::/own\n", AFFINITY, id="nonsense"),
        pytest.param(
            {"pod": quota_files("30000"), "pod/own": quota_files("80000")},
            "0::/pod/own\n",
            0.3,
            id="the groups around count too",
        ),
        pytest.param(
            {"cpu/own": quota_files("25000", 1)},
            "3:memory:/else\n2:cpu:/own\n0::/\n",
            0.25,
            id="version 1",
        ),
        pytest.param(
            {"cpu,cpuacct/own": quota_files("25000", 1)},
            "3:memory:/else\n2:cpu,cpuacct:/own\n0::/\n",
            0.25,
            id="version 1, mounted with the account",
        ),
        pytest.param(
            {"cpu/own": quota_files("-1", 1)}, "2:cpu:/own\n", AFFINITY, id="version 1, no quota"
        ),
        # the path in /proc/self/cgroup is that of the host, which is not mounted in a container
        pytest.param(
            {"cpu": quota_files("40000", 1)}, "2:cpu:/docker/1a2b\n", 0.4, id="in a container"
        ),
    ],
)
def test_quotas_of_groups_bound_the_cpus(groups, text, expected, tmp_path):
    for folder, files in groups.items():
        group(tmp_path / folder, **files)
    assert usable_cpus(tmp_path, membership(tmp_path, text)) == expected


def test_groups_are_distinguished_and_recognized(tmp_path):
    group(tmp_path / "pod", cpu__max="30000 100000\n")
    for name in ("one", "other"):
        group(tmp_path / "pod" / name, cpu__max="80000 100000\n")
    group(tmp_path / "pod" / "free", cpu__max="max 100000\n")
    one, other, free = (
        own_quotas(tmp_path, membership(tmp_path, f"0::/pod/{name}\n"))
        for name in ("one", "other", "free")
    )
    assert sorted(one.values()) == sorted(other.values()) == [0.3, 0.8]
    assert dict(one.items() & other.items()) == free
    # as from a container, in which its own group is the root
    assert (
        one.items() > own_quotas(tmp_path / "pod" / "one", membership(tmp_path, "0::/\n")).items()
    )


def test_idle_cpus_are_at_most_those_there_are():
    idle = IdleCpus()
    assert 0.0 <= idle.read() <= AFFINITY


def test_no_cpu_is_idle_where_the_system_tells_nothing(monkeypatch):
    def hides(percpu):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", hides)
    assert IdleCpus().read() == 0.0


def test_what_the_group_uses_is_not_idle(tmp_path, nobody_works):
    """A quota of half a CPU, of which the group uses more and more while nobody else does."""
    own = group(tmp_path / "own", cpu__max="50000 100000\n", cpu__stat="usage_usec 0\n")
    idle = IdleCpus(tmp_path, membership(tmp_path, "0::/own\n"))
    assert idle.read() == pytest.approx(0.5)
    group(own, cpu__stat="usage_usec 900000000000\n")
    assert idle.read() == 0.0


QUOTA = quota_files("50000", 1)


@pytest.mark.parametrize(
    ("folder", "path"),
    [("own", "own"), ("pod/own", "pod/own"), ("", ""), ("", "docker/1a2b")],
    ids=["own", "in a pod", "root", "in a container"],
)
@pytest.mark.parametrize("account", ["cpu,cpuacct", "cpuacct"])
def test_what_the_group_uses_is_not_idle_in_version_1(
    account, folder, path, tmp_path, nobody_works
):
    mount = "cpu" if account == "cpuacct" else account
    group(tmp_path / mount / folder, **QUOTA)
    used = group(tmp_path / account / folder, cpuacct__usage="0")
    text = f"4:{account}:/{path}\n" if mount == account else f"4:cpuacct:/{path}\n3:cpu:/{path}\n"
    idle = IdleCpus(tmp_path, membership(tmp_path, text))
    assert idle.read() == pytest.approx(0.5)
    group(used, cpuacct__usage=str(10**18))
    assert idle.read() == 0.0


def test_without_an_account_this_process_counts(tmp_path, monkeypatch, nobody_works):
    group(tmp_path / "cpu" / "own", **QUOTA)
    seconds = itertools.count(0, 10**9)
    monkeypatch.setattr("time.process_time", lambda: float(next(seconds)))
    idle = IdleCpus(tmp_path, membership(tmp_path, "3:cpu:/own\n"))
    assert idle.read() == 0.0


def test_the_group_whose_quota_is_used_up_decides(tmp_path, nobody_works):
    """The groups around have other processes, which use up their quota."""
    around = group(tmp_path / "pod", cpu__max="100000 100000\n", cpu__stat="usage_usec 0\n")
    group(tmp_path / "pod" / "own", cpu__max="50000 100000\n", cpu__stat="usage_usec 0\n")
    idle = IdleCpus(tmp_path, membership(tmp_path, "0::/pod/own\n"))
    assert idle.read() == pytest.approx(0.5)
    group(around, cpu__stat="usage_usec 900000000000000\n")
    assert idle.read() == 0.0


def test_a_real_quota_is_read():
    """Whatever this machine has: a number above zero, at most the affinity."""
    assert 0.0 < usable_cpus() <= AFFINITY < math.inf


# --- memory

HOST = 1000  # bytes that are available on it
UNLIMITED = 9223372036854771712
CLEAN = "anon 80\ninactive_file 70\nactive_file 50\n"
TOTAL = "inactive_file 1\ntotal_inactive_file 20\n"


def memory_files(limit, used, stat="", version=2):
    names = ("memory__max", "memory__current")
    if version == 1:
        names = ("memory__limit_in_bytes", "memory__usage_in_bytes")
    return {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory__stat": stat}


@pytest.mark.parametrize(
    ("groups", "text", "expected"),
    [
        pytest.param({}, "0::/\n", HOST, id="no groups"),
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
def test_limits_of_groups_bound_the_memory(groups, text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))
    for folder, values in groups.items():
        group(tmp_path / folder, **memory_files(*values))
    assert available_memory(tmp_path, membership(tmp_path, text)) == expected


def test_this_process_has_memory():
    assert 0 < available_memory() <= psutil.virtual_memory().total
