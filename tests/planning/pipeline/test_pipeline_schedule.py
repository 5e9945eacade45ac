"""Orders and routes: nothing is lost, nothing locks up, and no more is in flight than promised."""

import itertools

import numpy as np
import pytest
from pipeline_plants import even_devices, even_profile

from keras_het.planning.pipeline import (
    PipelinePlan,
    Stage,
    in_flight,
    routes,
    simulate,
    stage_order,
)


def stages_of(groups, taken, ahead=None):
    devices = iter(range(sum(groups)))
    return tuple(
        Stage(n, n + 1, tuple(itertools.islice(devices, size)), taken[n], ahead=ahead and ahead[n])
        for n, size in enumerate(groups)
    )


def round_robin(groups, micro_batches):
    return [tuple(m % size for m in range(micro_batches)) for size in groups]


def test_dapples_order_on_three_stages():
    stages = stages_of([1, 1, 1], round_robin([1, 1, 1], 4))
    named = [
        " ".join(f"{kind[0]}{m}" for kind, m in stage_order(stages, position, 0))
        for position in range(3)
    ]
    assert named == [
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]
    assert [in_flight(stages, position, 0) for position in range(3)] == [3, 2, 1]


def test_gpipe_runs_all_forward_passes_first():
    stages = stages_of([1, 2], round_robin([1, 2], 4))
    expected = tuple((kind, m) for kind in ("forward", "backward") for m in (1, 3))
    assert stage_order(stages, 1, 1, "gpipe") == expected
    assert in_flight(stages, 0, 0, "gpipe") == 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(40))
def test_no_routes_lock_up(schedule, seed):
    random = np.random.default_rng(seed)
    groups = random.integers(1, 4, random.integers(1, 6)).tolist()
    micro_batches = int(random.integers(1, 14))
    taken = [tuple(random.integers(0, size, micro_batches).tolist()) for size in groups]
    number = sum(groups)
    plan = PipelinePlan(stages_of(groups, taken), micro_batches, schedule, 0.0, (0.0,) * number)
    events = simulate(even_profile(len(groups), number), even_devices(number), plan).events
    assert sum(map(len, events)) == 2 * micro_batches * len(groups)


@pytest.mark.parametrize("seed", range(30))
def test_equal_replicas_hold_what_pipedream_says(seed):
    random = np.random.default_rng(seed)
    groups = random.integers(1, 5, random.integers(1, 5)).tolist()
    micro_batches = 24
    stages = stages_of(groups, round_robin(groups, micro_batches))
    for position, size in enumerate(groups):
        after = sum(groups[position:])
        expected = 1 if position == len(groups) - 1 else -(-after // size)
        for replica in range(size):
            assert in_flight(stages, position, replica) == min(
                expected, stages[position].routes.count(replica)
            )


def test_routes_end_as_early_as_any():
    random = np.random.default_rng(0)
    for _ in range(60):
        seconds, micro_batches = random.uniform(0.2, 3, 3), int(random.integers(1, 9))
        taken = routes(seconds, micro_batches)
        end = max(taken.count(k) * seconds[k] for k in range(3))
        best = min(
            max(np.array([a, b, micro_batches - a - b]) * seconds)
            for a in range(micro_batches + 1)
            for b in range(micro_batches + 1 - a)
        )
        assert end == pytest.approx(best)


def test_routes_of_equal_replicas_take_turns():
    assert routes([1.0, 1.0], 4) == (0, 1, 0, 1)
    assert routes([1.0, 2.0], 6) == (0, 0, 1, 0, 0, 1)
    assert routes([0.0], 2) == (0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: routes([], 4), "Each replica needs a finite time.*Received.*Give a list"),
        (lambda: routes([np.nan], 4), "Each replica needs a finite time"),
        (lambda: routes([-1.0], 4), "Times must not be negative.*Received.*Measure"),
        (lambda: routes([1.0], 0), "num_micro_batches must be.*Received: num_micro_batches=0"),
        (lambda: stage_order((), 0, 0, "2f2b"), 'must be "1f1b" or "gpipe".*Received: sched'),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
