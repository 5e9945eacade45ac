"""The parameter service's benchmark: kinds that do not fit into memory together take turns."""

import importlib

import pytest

SECONDS = {"service": 0.2, "remote_variables": 0.4, "socket": 0.1, "echo": 0.16}


@pytest.fixture
def benchmark():
    return importlib.import_module("parameter_service")


@pytest.fixture
def groups(benchmark, monkeypatch):
    """Groups without processes; and the kinds that were alive at each run."""
    alive, seen = [], []

    class Group:
        def start(self, kind, size_mb, num_clients):
            self.kind = kind
            alive.append(kind)

        def run(self, exchanges):
            seen.append(tuple(alive))
            return SECONDS[self.kind]

        def memory_mb(self):
            return 1500.0, 1200.0, 500.0

        def close(self):
            alive.remove(self.kind)

    monkeypatch.setattr(benchmark, "Group", Group)
    return seen


def set_available(benchmark, monkeypatch, gigabytes):
    class Memory:
        available = gigabytes * 1e9

    monkeypatch.setattr(benchmark.psutil, "virtual_memory", Memory)


@pytest.mark.parametrize(("gigabytes", "together"), [(64, True), (16, False)])
def test_what_fits_is_alive_together(benchmark, groups, monkeypatch, gigabytes, together):
    set_available(benchmark, monkeypatch, gigabytes)
    (row,) = benchmark.measure(400, 4, quick=False)
    assert row["alive_together"] is together
    assert row["ratio_to_socket"] == 0.5 and row["ratio_to_remote_variables"] == 2
    assert row["gb_per_s"] == pytest.approx(16) and row["memory_ratio"] == 2.5
    if together:
        assert groups[-1] == benchmark.KINDS and row["num_runs"] == 7
    else:
        twice = [(kind,) for kind in benchmark.KINDS for _ in range(2)]  # the first warms up
        assert groups == twice * row["num_runs"]


def test_small_weights_fit(benchmark, monkeypatch):
    set_available(benchmark, monkeypatch, 12)
    assert benchmark._fit_together(40, 4)
    assert not benchmark._fit_together(400, 4)
