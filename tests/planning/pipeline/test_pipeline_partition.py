"""The partition: optimal against trying everything, and honest about what does not fit."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from exhaustive import chains, exhaustive
from pipeline_plants import even_devices, even_profile, random_case

from keras_het.planning.pipeline import (
    Devices,
    in_flight,
    plan_pipeline,
    plan_with_cuts,
    simulate,
)
from keras_het.planning.pipeline.least_latency import Chain, LeastLatency
from keras_het.planning.pipeline.partition import Candidates
from keras_het.planning.pipeline.problem import Problem
from keras_het.planning.pipeline.recomputation import stage_memory
from keras_het.planning.pipeline.refinement import device_orders, find_chains, search


def least_estimate(problem, order, tolerance=0.0):
    return search([LeastLatency(problem, order)], tolerance)


def random_problem(seed):
    random = np.random.default_rng(seed)
    limited = seed % 2 == 1
    units, number = int(random.integers(2, 7)), int(random.integers(1, 6))
    profile, devices = random_case(random, units, number, limited, proportional=seed % 3 == 0)
    return Problem(
        profile,
        devices,
        int(random.integers(1, 9)),
        "gpipe" if seed % 7 == 0 else "1f1b",
        ("auto", "auto", "never", "auto", "always")[seed % 5],
        profile.allowed_cuts(),
    )


def check(seed):
    problem = random_problem(seed)
    order = tuple(np.random.default_rng(seed).permutation(problem.devices.num_devices).tolist())
    best, found = exhaustive(problem, order), least_estimate(problem, order)
    if not np.isfinite(best):
        assert found == []
        return False
    assert found[0][0] == pytest.approx(best, rel=1e-9)
    return True


@pytest.mark.quick("0", "1")
@pytest.mark.parametrize("part", range(5))
def test_the_estimate_is_the_least_of_all(part):
    fit = sum(check(seed) for seed in range(part * 60, part * 60 + 60))
    assert fit > 40


@pytest.mark.full
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_twelve_units_on_eight_devices_are_within_a_percent(limited, seed):
    profile, devices = random_case(np.random.default_rng(seed), 12, 8, limited)
    problem = Problem(profile, devices, 8, "1f1b", "auto", profile.allowed_cuts())
    order = device_orders(profile, devices)[0]
    exact, found = least_estimate(problem, order), least_estimate(problem, order, 0.002)
    assert bool(exact) == bool(found)
    if exact:
        assert exact[0][0] * (1 - 1e-9) <= found[0][0] <= exact[0][0] * 1.01


@pytest.mark.parametrize("seed", range(24))
def test_a_plan_keeps_its_promises(seed):
    random = np.random.default_rng(seed)
    profile, devices = random_case(random, 7, 5, limited=seed % 2 == 1)
    schedule = "gpipe" if seed % 4 == 3 else "1f1b"
    try:
        plan = plan_pipeline(profile, devices, 6, schedule)
    except ValueError as error:
        assert "lacks" in str(error)
        return
    timeline = simulate(profile, devices, plan)
    assert plan.step_seconds == pytest.approx(timeline.step_seconds)
    assert all(seconds >= plan.step_seconds * (1 - 1e-9) for _, seconds in plan.alternatives)
    assert [stage.first for stage in plan.stages[1:]] == [stage.end for stage in plan.stages[:-1]]
    assert (plan.stages[0].first, plan.stages[-1].end) == (0, 7)
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(used) == len(set(used))
    for position, stage in enumerate(plan.stages):
        assert len(stage.routes) == 6
        assert set(stage.routes) == set(range(len(stage.devices)))
        for replica, device in enumerate(stage.devices):
            d = in_flight(plan.stages, position, replica, schedule)
            held = stage_memory(profile, stage.first, stage.end, d, stage.recomputed)
            assert plan.memory_bytes[device] == pytest.approx(held)
            assert held <= devices.memory_bytes[device] * (1 + 1e-8)


def simulated_best(problem):
    """The least simulated step of all chains, for every order of the hosts."""
    candidates = Candidates(problem)
    for order in device_orders(problem.profile, problem.devices):
        for stages in chains(problem.cuts, order):
            _, ends, groups = zip(*stages, strict=True)
            candidates.add(Chain((0, *ends), groups))
    return candidates.best()


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_plans_are_close_to_the_best_simulated_ones(part):
    ratios = []
    for seed in range(part * 12, part * 12 + 12):
        random = np.random.default_rng(seed)
        profile, devices = random_case(random, 5, 4, limited=seed % 2 == 1)
        micro_batches = int(random.integers(2, 9))
        problem = Problem(profile, devices, micro_batches, "1f1b", "auto", profile.allowed_cuts())
        best = simulated_best(problem)
        if best is None:
            with pytest.raises(ValueError, match="No plan fits"):
                plan_pipeline(profile, devices, micro_batches)
            continue
        plan = plan_pipeline(profile, devices, micro_batches)
        ratios.append(plan.step_seconds / best.step_seconds)
    assert len(ratios) >= 8
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.15


def test_one_stage_is_estimated_exactly():
    for seed in range(20):
        profile, devices = random_case(np.random.default_rng(seed), 4, 3, False)
        problem = Problem(profile, devices, 7, "1f1b", "auto", profile.allowed_cuts())
        program = LeastLatency(problem, (0, 1, 2))
        plan = Candidates(problem).add_one_stage([0, 1, 2])
        if plan is None or len(plan.stages[0].devices) < 3:
            continue
        chain = Chain((0, profile.num_units), ((0, 1, 2),))
        assert sum(program.cost(chain)) == pytest.approx(plan.step_seconds)


def test_small_weights_and_wide_activations_are_not_pipelined():
    profile = even_profile(6, 4, cut=100.0, weights=0.01)
    plan = plan_pipeline(profile, even_devices(4), 8)
    (stage,) = plan.stages
    assert stage.devices == (0, 1, 2, 3)
    assert plan.step_seconds == dict(plan.alternatives)["data parallelism on all devices"]


def test_large_weights_and_thin_cuts_are_pipelined():
    profile = even_profile(8, 4, cut=0.01, weights=100.0)
    plan = plan_pipeline(profile, even_devices(4), 16)
    assert [len(stage.devices) for stage in plan.stages] == [1, 1, 1, 1]
    assert [stage.end - stage.first for stage in plan.stages] == [2, 2, 2, 2]


def test_useless_links_leave_one_device():
    profile = even_profile(4, 3, cut=1e6, weights=1e6)
    plan = plan_pipeline(profile, even_devices(3), 4)
    assert [stage.devices for stage in plan.stages] == [(0,)]
    assert "not used: worker 1 GPU:1, worker 2 GPU:2" in str(plan)


def test_a_slow_device_is_left_out():
    profile = even_profile(4, 3, cut=0.001, weights=10.0)
    slow = np.array([1.0, 1.0, 50.0])
    profile = dataclasses.replace(
        profile,
        forward_seconds=profile.forward_seconds * slow,
        backward_seconds=profile.backward_seconds * slow,
    )
    plan = plan_pipeline(profile, even_devices(3), 8)
    assert sorted(device for stage in plan.stages for device in stage.devices) == [0, 1]


def test_units_that_share_weights_stay_together():
    profile = dataclasses.replace(even_profile(6, 3, cut=0.01, weights=50.0), together=((1, 4),))
    assert profile.allowed_cuts() == (0, 1, 5, 6)
    plan = plan_pipeline(profile, even_devices(3), 12)
    assert {stage.first for stage in plan.stages} <= {0, 1, 5}
    with pytest.raises(ValueError, match=r"from layer_1 to layer_4 share weights.*before layer_3"):
        plan_with_cuts(profile, even_devices(3), [3], 12)


def test_memory_makes_stages_recompute():
    profile = even_profile(4, 2, cut=0.01, weights=50.0)
    free = plan_pipeline(profile, even_devices(2), 8)
    assert free.memory_bytes == (300 + 2 * 2, 300 + 2)
    tight = plan_pipeline(profile, even_devices(2, memory=303.5), 8)
    assert [len(stage.recomputed) for stage in tight.stages] == [1, 0]
    assert tight.step_seconds > free.step_seconds
    with pytest.raises(ValueError, match=r'lacks 0.5 B.*recompute="auto"'):
        plan_pipeline(profile, even_devices(2, memory=303.5), 8, recompute="never")
    every = plan_pipeline(profile, even_devices(2), 8, recompute="always")
    assert all(stage.recomputed == tuple(range(stage.first, stage.end)) for stage in every.stages)


def test_no_plan_says_which_device_lacks_what():
    profile = even_profile(4, 2, cut=0.01, weights=50.0)
    with pytest.raises(
        ValueError,
        match="No plan fits.*Received: 4 units, 2 devices.*"
        r"worker 1 GPU:1 lacks 202 B \(202 bytes\). Use smaller micro-batches",
    ):
        plan_with_cuts(profile, even_devices(2, memory=(400.0, 100.0)), [2], 8)


@pytest.mark.parametrize("cuts", [[2], [1, 4], [1, 2, 3]])
def test_named_cuts_are_kept(cuts):
    profile, devices = random_case(np.random.default_rng(5), 6, 5, False)
    plan = plan_with_cuts(profile, devices, cuts, 6)
    assert [stage.first for stage in plan.stages] == [0, *cuts]
    assert plan.step_seconds >= plan_pipeline(profile, devices, 6).step_seconds * (1 - 1e-9)


def test_many_units_are_searched_more_and_more_closely():
    profile = even_profile(90, 3, cut=0.01, weights=5.0)
    plan = plan_pipeline(profile, even_devices(3), 12)
    assert [len(stage.devices) for stage in plan.stages] == [1, 1, 1]
    assert plan.step_seconds < 1.01 * (12 + 2) * 30


def cost_of(program, chain):
    """The estimate of a chain, infinite if it does not follow the program's order."""
    try:
        program.exact(chain)
        return sum(program.cost(chain))
    except (KeyError, ValueError, IndexError):
        return np.inf


@pytest.mark.quick("0", "1")
@pytest.mark.parametrize("seed", range(6))
def test_looking_more_closely_finds_what_all_cuts_have(seed):
    profile, devices = random_case(np.random.default_rng(seed), 80, 3, limited=seed % 2 == 1)
    problem = Problem(profile, devices, 8, "1f1b", "auto", profile.allowed_cuts())
    orders = device_orders(profile, devices)
    programs = [LeastLatency(problem, order) for order in orders]
    every = search(programs, 0.002)
    chain = find_chains(problem, 0.002)[0]
    estimate = min(cost_of(program, chain) for program in programs)
    assert every[0][0] * (1 - 0.002) <= estimate <= 1.01 * every[0][0]


def test_the_local_search_balances_stages():
    profile, devices = even_profile(6, 2, cut=0.001, weights=100.0), even_devices(2)
    problem = Problem(profile, devices, 8, "1f1b", "auto", profile.allowed_cuts())
    candidates = Candidates(problem)
    start = Chain((0, 1, 6), ((0,), (1,)))
    candidates.add(start)
    candidates.improve([start], 100)
    assert [stage.first for stage in candidates.best().stages] == [0, 3]


def test_slow_links_let_more_micro_batches_go_ahead():
    profile = even_profile(4, 2, cut=1.5, weights=500.0)
    plan = plan_pipeline(profile, even_devices(2), 16)
    assert len(plan.stages) == 2
    usual = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(s, ahead=None) for s in plan.stages)
    )
    assert plan.stages[0].ahead is not None
    usual_seconds = simulate(profile, even_devices(2), usual).step_seconds
    assert plan.step_seconds < 0.85 * usual_seconds


def test_the_table_names_layers_devices_and_alternatives():
    profile = even_profile(4, 2, cut=0.01, weights=50.0)
    lines = str(plan_pipeline(profile, even_devices(2, memory=303.5), 8)).splitlines()
    titles = "stage layers devices micro-batches recomputed memory"
    assert " ".join(lines[0].split()) == titles
    assert "layer_0 .. layer_1  worker 0 GPU:0" in lines[1]
    assert lines[3].startswith("predicted step: ")
    assert lines[4].strip() == "data parallelism on all devices: does not fit"
    assert lines[5].strip() == "one device: does not fit"


def test_equal_hosts_have_one_order():
    assert device_orders(even_profile(2, 4), even_devices(4, (0, 0, 1, 1))) == [(0, 1, 2, 3)]


def test_all_orders_of_unequal_hosts_and_the_fastest_device_first():
    profile, devices = random_case(np.random.default_rng(0), 4, 7, False)
    orders = device_orders(profile, devices)
    hosts = len(set(devices.hosts))
    assert 1 < len(orders) <= math.factorial(hosts)
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    for order in orders:
        assert sorted(order) == list(range(7))
        pairs = list(itertools.pairwise(order))
        changes = [devices.hosts[before] != devices.hosts[after] for before, after in pairs]
        assert sum(changes) == hosts - 1
        for (before, after), other in zip(pairs, changes, strict=True):
            assert other or seconds[before] <= seconds[after]


def test_many_hosts_follow_their_fastest_links():
    number = 9
    hidden = np.random.default_rng(1).permutation(number)
    distance = np.abs(np.argsort(hidden)[:, None] - np.argsort(hidden))
    devices = Devices(
        tuple(map(str, range(number))),
        tuple(range(number)),
        10.0 ** -distance.astype(float),
        np.zeros((number, number)),
        np.full(number, np.inf),
    )
    orders = device_orders(even_profile(4, number, cut=1.0), devices)
    assert orders[0] in (tuple(hidden.tolist()), tuple(hidden[::-1].tolist()))
    assert len(orders) <= 2 * number


planned = functools.partial(
    plan_pipeline, profile=even_profile(3, 2), devices=even_devices(2), micro_batches=4
)
cut = functools.partial(
    plan_with_cuts, profile=even_profile(3, 2), devices=even_devices(2), micro_batches=4
)
profile_with = functools.partial(dataclasses.replace, even_profile(3, 2))
devices_with = functools.partial(dataclasses.replace, even_devices(2))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (planned, {"micro_batches": 0}, "be a whole number.*Received: micro_batches=0"),
        (planned, {"schedule": "none"}, "schedule must be.*Received: schedule='none'"),
        (planned, {"recompute": "some"}, "recompute must be.*Received: recompute='some'"),
        (planned, {"devices": even_devices(3)}, "each device. Received: 2 columns, 3 devices"),
        (cut, {"cuts": [2, 1]}, r"Cuts must rise, from 1 to 2. Received: \[2, 1\]"),
        (cut, {"cuts": [3]}, "Cuts must rise"),
        (cut, {"cuts": [1, 2]}, "needs a device of its own. Received: 3 stages, 2 devices"),
        (profile_with, {"names": ()}, "at least one unit"),
        (profile_with, {"forward_seconds": np.ones(3)}, r"forward_seconds .* shape \(3, 1\)"),
        (profile_with, {"backward_seconds": np.ones((3, 1))}, r"backward_sec.* shape \(3, 2\)"),
        (profile_with, {"cut_bytes": np.ones(3)}, r"cut_bytes must have shape \(4,\)"),
        (profile_with, {"activation_bytes": -np.ones(3)}, "activation_bytes must be 0 or more and"),
        (profile_with, {"together": ((1, 3),)}, r"0 to 2. Received: together=\(\(1, 3\),\)"),
        (devices_with, {"names": ()}, "needs a device"),
        (devices_with, {"hosts": (0,)}, r"number of its host. Received: hosts=\(0,\)"),
        (devices_with, {"memory_bytes": np.ones(3)}, r"memory_bytes must have shape \(2,\)"),
        (devices_with, {"latency_seconds": -np.ones((2, 2))}, "0 or more. Received: -1.0"),
        (devices_with, {"bytes_per_second": np.zeros((2, 2))}, "must reach every other one"),
    ],
)
def test_mistakes_are_named(make, change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)
