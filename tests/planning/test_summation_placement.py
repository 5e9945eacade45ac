"""The split of the summation: optimal, and the paper's wherever the paper has one."""

import itertools
import math
from fractions import Fraction

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.roles.summation_placement import (
    plan_summation,
)

RATES = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=5)


def seconds_of(total, workers, spare, shares):
    """The time of the most loaded link by moving every byte, without the formulas of the plan."""
    machines = [*workers, *spare]
    sent = [0.0] * len(machines)
    received = [0.0] * len(machines)
    for owner, own in enumerate(shares):
        for worker in range(len(workers)):
            if worker != owner:  # push, then the sum comes back
                sent[worker] += own
                received[owner] += own
                sent[owner] += own
                received[worker] += own
    assert sum(shares) == pytest.approx(total)
    assert sent == received
    return max(load / rate for load, rate in zip(sent, machines, strict=True))


def grid(parts, machines):
    """All ways to give `parts` pieces to the machines."""
    for cuts in itertools.combinations(range(parts + machines - 1), machines - 1):
        edges = (-1, *cuts, parts + machines - 1)
        yield [right - left - 1 for left, right in itertools.pairwise(edges)]


def equal_links_split(n, k, gradient_bytes):
    """The paper's closed form (OSDI 2020, section 4.1): bytes of a worker and of a spare machine.

    D = n^2 + kn - 2k, M_g = (n - k) / D M and M_c = 2(n - 1) / D M for k <= n; beyond that spare
    machines alone sum.
    """
    if k > n:
        return Fraction(0), Fraction(gradient_bytes, k)
    denominator = n * n + k * n - 2 * k
    on_spare = Fraction(2 * (n - 1) * gradient_bytes, denominator) if k else Fraction(0)
    return Fraction((n - k) * gradient_bytes, denominator), on_spare


@pytest.mark.parametrize("n", range(2, 10))
def test_equal_links_give_the_closed_form(n):
    rate, total = 1e9, 7 * 10**8
    for k in range(n + 3):
        plan = plan_summation(total, [rate] * n, [rate] * k)
        on_worker, on_spare = equal_links_split(n, k, total)
        assert n * on_worker + k * on_spare == total
        assert plan.worker_bytes == pytest.approx([float(on_worker)] * n, abs=1)
        assert plan.spare_bytes == pytest.approx([float(on_spare)] * k, abs=1)
        used = min(k, n)
        d = n * n + used * n - 2 * used
        assert plan.seconds == pytest.approx(2 * n * (n - 1) * total / (d * rate), rel=1e-6)
        assert plan.speedup_over_all_reduce == pytest.approx(d / n**2, rel=1e-6)
        if 0 < k <= n:
            expected = d / (2 * k * (n - 1))
            assert plan.speedup_over_parameter_servers == pytest.approx(expected, rel=1e-6)


def test_without_spare_machines_it_is_all_reduce():
    plan = plan_summation(1200, [5.0] * 4)
    assert plan.worker_bytes == (300, 300, 300, 300)
    assert plan.link_bytes == (1800,) * 4  # 2 (n - 1) / n * M
    assert plan.seconds == plan.all_reduce_seconds == 360.0
    assert plan.parameter_server_seconds == math.inf


def test_as_many_spare_machines_as_workers_are_parameter_servers():
    plan = plan_summation(1200, [5.0] * 4, [5.0] * 4)
    assert plan.worker_bytes == (0, 0, 0, 0)
    assert plan.spare_bytes == (300, 300, 300, 300)
    assert plan.link_bytes == (1200,) * 8
    assert plan.seconds == plan.parameter_server_seconds == 240.0


def test_two_workers_and_a_spare_machine_by_hand():
    plan = plan_summation(400, [1.0, 1.0], [1.0])
    assert plan.machine_bytes == (100, 100, 200)
    assert plan.link_bytes == (400, 400, 400)


def test_an_unequal_cluster_by_hand():
    # t = 2 * 2 * 600 / (10 + 20 + 30 + 1/3 * 12) = 37.5 < 600 / 10: the first worker decides, it
    # sums nothing, and the rooms 0, 600, 600, 240 are scaled to 600 bytes.
    plan = plan_summation(600, [10.0, 20.0, 30.0], [12.0])
    assert plan.machine_bytes == (0, 250, 250, 100)
    assert plan.link_bytes == (600, 850, 850, 300)
    assert plan.seconds == 60.0
    # t = 2400 / (30 + 1/3 * 30) = 60 with equal workers of 10 and the rooms 0, 0, 0, 600
    assert plan_summation(600, [10.0] * 3, [30.0]).machine_bytes == (0, 0, 0, 600)


def test_a_single_worker_sends_nothing():
    plan = plan_summation(100, [3.0], [5.0])
    assert plan.machine_bytes == (100, 0)
    assert plan.link_bytes == (0, 0)
    assert plan.seconds == 0.0 == plan.all_reduce_seconds
    assert plan.speedup_over_all_reduce == 1.0


@given(workers=RATES, spare=st.lists(st.integers(1, 50).map(float), max_size=4))
def test_traffic_of_the_plan_is_the_traffic_of_the_bytes(workers, spare):
    plan = plan_summation(10**6, workers, spare)
    assert sum(plan.machine_bytes) == 10**6
    moved = seconds_of(10**6, workers, spare, plan.machine_bytes)
    assert plan.seconds == pytest.approx(moved)
    n = len(workers)
    if n > 1:
        real = 2 * (n - 1) * 1e6 / (sum(workers) + (n - 2) / n * sum(spare))
        assert plan.seconds == pytest.approx(max(1e6 / min(workers), real), rel=1e-4)


@examples(40)
@given(
    workers=st.lists(st.integers(1, 9).map(float), min_size=2, max_size=3),
    spare=st.lists(st.integers(1, 9).map(float), max_size=2),
)
def test_no_split_of_a_grid_is_faster(workers, spare):
    parts, total = 12, 120_000
    best = min(
        seconds_of(total, workers, spare, [total / parts * part for part in split])
        for split in grid(parts, len(workers) + len(spare))
    )
    seconds = plan_summation(total, workers, spare).seconds
    assert seconds <= best * (1 + 1e-4)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"worker_rates must be positive .* Received: 0.0"):
        plan_summation(10, [1.0, 0.0])
    with pytest.raises(ValueError, match=r"spare_rates must be positive .* Received: inf"):
        plan_summation(10, [1.0], [math.inf])
    with pytest.raises(ValueError, match=r"at least one worker .* Received: gradient_bytes=10"):
        plan_summation(10, [])
    with pytest.raises(ValueError, match="Received: gradient_bytes=0"):
        plan_summation(0, [1.0])
