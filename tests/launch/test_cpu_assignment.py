import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.launch.local.local_cluster import CpuAssignment, assign_cpus

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to CPUs"
)


@needs_affinity
def test_known_assignments() -> None:
    assert assign_cpus(2, [0, 1, 2, 5]) == CpuAssignment(((0, 2), (1, 5)), (2, 2))
    assert assign_cpus(2, [0, 1, 2]) == CpuAssignment(((0, 2), (1,)), (2, 1))
    assert assign_cpus(3, [0, 1]) == CpuAssignment(None, (1, 1, 1))
    assert assign_cpus(3, [0, 1], pin=True) == CpuAssignment(((0,), (1,), (0,)), (1, 1, 1))
    assert assign_cpus(2, [0, 1], pin=False) == CpuAssignment(None, (1, 1))
    assert assign_cpus(2, [0, 1, 2], cpus_per_worker=1) == CpuAssignment(((0,), (1,)), (1, 1))
    assert assign_cpus(2, [0, 1, 2], cpus_per_worker=2) == CpuAssignment(None, (2, 2))
    assert assign_cpus(2, [0, 1, 2], 2, pin=True) == CpuAssignment(((0, 1), (2, 0)), (2, 2))


def test_a_quota_is_divided_into_threads() -> None:
    def threads(usable: float, **options: int) -> tuple[int, ...]:
        return assign_cpus(3, range(10), usable=usable, **options).threads_per_worker

    assert threads(10.0) == (4, 3, 3)
    assert threads(9.5) == (3, 3, 3)
    assert threads(7.0) == (2, 2, 2)
    assert threads(1.5) == (1, 1, 1)
    assert threads(1.5, cpus_per_worker=2) == (2, 2, 2)


@needs_affinity
@given(st.integers(1, 9), st.integers(1, 9))
def test_every_cpu_is_dealt_once_and_every_worker_has_one(workers: int, cpus: int) -> None:
    assignment = assign_cpus(workers, range(cpus), pin=True)
    assert assignment.cpu_sets is not None
    dealt = [cpu for own in assignment.cpu_sets for cpu in own]
    assert set(dealt) == set(range(cpus))
    assert len(dealt) == max(workers, cpus)
    assert all(assignment.cpu_sets)
    sizes = assignment.threads_per_worker
    assert max(sizes) - min(sizes) <= 1
    assert (assign_cpus(workers, range(cpus)).cpu_sets is not None) == (workers <= cpus)


@pytest.mark.parametrize("cpus_per_worker", [0, 3])
def test_refuses_impossible_numbers(cpus_per_worker: int) -> None:
    with pytest.raises(ValueError, match=rf"cpus_per_worker={cpus_per_worker}; expected 1 to 2"):
        assign_cpus(1, [0, 1], cpus_per_worker)


def test_says_when_the_system_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert assign_cpus(1, [0]).cpu_sets is None
    with pytest.raises(ValueError, match="cannot bind processes to CPUs"):
        assign_cpus(1, [0], pin=True)
