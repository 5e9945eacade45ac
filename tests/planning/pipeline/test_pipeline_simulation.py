"""The simulation: closed forms, and every event as early as its rules allow."""

import itertools

import numpy as np
import pytest
from pipeline_plants import even_devices, even_profile, random_case

from keras_het.planning.pipeline import Devices, PipelinePlan, Stage, routes, simulate, stage_order


def plan_of(profile, groups, cuts, micro_batches, schedule="1f1b", recomputed=()):
    bounds = (0, *cuts, profile.num_units)
    seconds = profile.forward_seconds + profile.backward_seconds
    stages = tuple(
        Stage(
            first,
            end,
            group,
            routes(seconds[first:end, list(group)].sum(axis=0), micro_batches),
            tuple(unit for unit in recomputed if first <= unit < end),
        )
        for (first, end), group in zip(itertools.pairwise(bounds), groups, strict=True)
    )
    return PipelinePlan(stages, micro_batches, schedule, 0.0, (0.0,) * profile.num_devices)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_equal_stages_take_the_known_time(schedule, stages):
    profile, devices = even_profile(stages, stages), even_devices(stages)
    plan = plan_of(profile, [(s,) for s in range(stages)], range(1, stages), 7, schedule)
    timeline = simulate(profile, devices, plan)
    assert timeline.step_seconds == pytest.approx(7 + stages - 1)
    for device in range(stages):
        assert timeline.busy_seconds(device) == pytest.approx(7)
        assert timeline.idle_seconds(device) == pytest.approx(stages - 1)


def test_data_parallelism_is_the_slowest_replica_and_the_all_reduce():
    profile = even_profile(4, 3, weights=3.0)
    devices = even_devices(3, rate=2.0, latency=0.5)
    timeline = simulate(profile, devices, plan_of(profile, [(0, 1, 2)], [], 7))
    # 3 of 7 micro-batches of 4 s; the ring moves 2/3 of 12 bytes twice and has 4 latencies.
    assert timeline.step_seconds == pytest.approx(3 * 4 + 4 * (0.5 + 12 / 3 / 2.0))
    (reduction,) = [e for e in timeline.events[1] if e.kind == "all_reduce"]
    assert reduction.end - reduction.begin == pytest.approx(4 * 2.5)


def test_the_devices_of_a_host_add_up_before_the_hosts_do():
    rates = np.where(np.equal.outer([0, 0, 1, 1], [0, 0, 1, 1]), np.inf, 2.0)
    none = np.zeros((4, 4))
    devices = Devices(tuple("abcd"), (0, 0, 1, 1), rates, none, np.full(4, np.inf))
    # two hosts: each sends the bytes once
    assert devices.all_reduce_seconds(range(4), 12.0) == pytest.approx(12 / 2)
    assert devices.all_reduce_seconds([0, 1], 12.0) == 0
    assert devices.all_reduce_seconds([1, 2], 12.0) == pytest.approx(12 / 2)


def test_a_slow_link_is_the_bottleneck():
    profile = even_profile(2, 2, seconds=0.3, cut=6.0)
    plan = plan_of(profile, [(0,), (1,)], [1], 5, "gpipe")
    timeline = simulate(profile, even_devices(2, rate=2.0), plan)
    # 5 transfers of 3 s there, the last backward pass, its 5 transfers back wait for each other.
    first_back = 0.1 + 5 * 3 + 0.1 + 0.2
    assert timeline.step_seconds == pytest.approx(first_back + 5 * 3 + 0.2)


def test_recomputation_takes_the_forward_time_again():
    profile, devices = even_profile(3, 1), even_devices(1)
    timeline = simulate(profile, devices, plan_of(profile, [(0,)], [], 4, recomputed=(0, 2)))
    assert timeline.step_seconds == pytest.approx(4 * (3 + 2 / 3))
    kinds = [event.kind for event in timeline.events[0]]
    assert kinds == ["forward", "recompute", "backward"] * 4


def test_hosts_share_a_link_but_devices_of_a_host_do_not():
    profile = even_profile(2, 4, seconds=0.003, cut=1.0)
    plan = plan_of(profile, [(0, 1), (2, 3)], [1], 2, "gpipe")
    shared = simulate(profile, even_devices(4, (0, 0, 1, 1)), plan).step_seconds
    own = simulate(profile, even_devices(4, (0, 1, 2, 3)), plan).step_seconds
    assert shared == pytest.approx(3.005, abs=0.01)  # there twice, back once while the other waits
    assert own == pytest.approx(2.005, abs=0.01)


def random_plan(seed):
    random = np.random.default_rng(seed)
    units, number = int(random.integers(2, 8)), int(random.integers(2, 7))
    profile, devices = random_case(random, units, number, False)
    stages = int(random.integers(1, min(units, number) + 1))
    cuts = sorted(random.choice(np.arange(1, units), stages - 1, replace=False).tolist())
    splits = sorted(random.choice(np.arange(1, number), stages - 1, replace=False).tolist())
    order = random.permutation(number).tolist()
    groups = [tuple(order[a:b]) for a, b in itertools.pairwise([0, *splits, number])]
    recomputed = tuple(np.flatnonzero(random.random(units) < 0.3).tolist())
    schedule = str(random.choice(["1f1b", "gpipe"]))
    plan = plan_of(profile, groups, cuts, int(random.integers(1, 9)), schedule, recomputed)
    return profile, devices, plan


def ring_links(devices, group):
    ring = sorted(group, key=lambda d: (devices.hosts[d], d))
    return [devices.link(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_every_event_is_as_early_as_its_rules_allow(seed):
    profile, devices, plan = random_plan(seed)
    timeline = simulate(profile, devices, plan)
    ended, links, last = {}, {}, len(plan.stages) - 1
    for events in timeline.events:
        for e in events:
            ended[e.kind, e.stage, e.micro_batch, e.begin] = e.end
    passes = {
        (k, s, m): (b, e) for (k, s, m, b), e in ended.items() if k in ("forward", "backward")
    }
    assert len(passes) == 2 * len(plan.stages) * plan.num_micro_batches
    # Where a micro-batch's tensors are once their transfer has ended.
    there = {}
    for sender, events in enumerate(timeline.events):
        for e in events:
            if e.kind == "all_reduce":
                for link in ring_links(devices, plan.stages[e.stage].devices):
                    links.setdefault(link, set()).add((e.begin, e.end, None))
            if e.kind != "transfer":
                continue
            asked = passes["forward", e.stage, e.micro_batch][1]
            back = passes["backward", e.stage, e.micro_batch][1]
            going = "forward"
            if e.stage and (e.stage == last or e.begin >= back):
                going, asked = "backward", back
            assert e.begin >= asked - 1e-9
            to = e.stage + (1 if going == "forward" else -1)
            receiver = plan.stages[to].devices[plan.stages[to].routes[e.micro_batch]]
            there[going, to, e.micro_batch] = e.end
            links.setdefault(devices.link(sender, receiver), set()).add((e.begin, e.end, asked))
    for used in links.values():
        for (_, end, _), (begin, _, asked) in itertools.pairwise(sorted(used, key=lambda u: u[:2])):
            assert begin >= end - 1e-9
            assert asked is None or begin == pytest.approx(max(end, asked))
    for position, stage in enumerate(plan.stages):
        for replica, device in enumerate(stage.devices):
            free = 0.0
            again = profile.forward_seconds[list(stage.recomputed), device].sum()
            for kind, m in stage_order(plan.stages, position, replica, plan.schedule):
                begin, end = passes[kind, position, m]
                before = position - 1 if kind == "forward" else position + 1
                ready = 0.0
                if 0 <= before <= last:
                    ready = there.get((kind, position, m), passes.get((kind, before, m), (0, 0))[1])
                if kind == "backward":
                    free += again
                assert begin == pytest.approx(max(free, ready))
                free = end
    reduces = [e.end for events in timeline.events for e in events if e.kind == "all_reduce"]
    assert timeline.step_seconds == pytest.approx(max([e for _, e in passes.values()] + reduces))


def test_stages_that_wait_for_each_other_are_refused():
    profile = even_profile(2, 2)
    taken = (0,) * 4
    stages = (Stage(0, 1, (0,), taken, ahead=0), Stage(1, 2, (1,), taken, ahead=2))
    plan = PipelinePlan(stages, 4, "1f1b", 0.0, (0.0, 0.0))
    with pytest.raises(ValueError, match=r"wait for each other. Received: ahead=\[0, 2\]"):
        simulate(profile, even_devices(2), plan)
