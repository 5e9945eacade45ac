"""Times of shares that are computed in parts: their fit, and the shares that follow from them."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plants import STATIC, Plant, by_speeds, simulate, slow_down

from keras_het.planning import (
    BalancePlan,
    LinearTimeModel,
    MicroBatchTimeModel,
    TimeModelFit,
    make_policy,
    min_max_shares,
)
from keras_het.planning.time_model import KnownDevice, known_from_json, known_to_json
from keras_het.planning.time_model_fit import Measurement, fit_parts


def best_shares(models, total):
    def times(shares):
        return np.array([m.seconds(int(b)) for m, b in zip(models, shares, strict=True)])

    return min_max_shares(times, total, [0] * len(models))


@dataclasses.dataclass(frozen=True)
class InParts(Plant):
    """Devices of which each part after the first costs something more."""

    sizes: tuple[int, ...] = ()
    part: tuple[float, ...] = ()

    def line(self, shares):
        further = np.maximum(np.ceil(np.asarray(shares) / np.array(self.sizes)), 1) - 1
        return super().line(shares) + np.array(self.part) * further


def in_parts(name, speeds, sizes, fixed, part, **options):
    plant = by_speeds(name, speeds, fixed, **options)
    fields = {each.name: getattr(plant, each.name) for each in dataclasses.fields(plant)}
    return InParts(**fields, sizes=sizes, part=(part,) * len(speeds))


CUT = [
    in_parts("one, all is per part", (4, 2, 1), (50, 1000, 1000), 0.01, 0.01),
    in_parts("one, half is per part", (4, 2, 1), (50, 1000, 1000), 0.02, 0.01),
    in_parts("one, nothing is per part", (4, 2, 1), (50, 1000, 1000), 0.02, 0.0),
    in_parts("all", (4, 2, 1), (16, 16, 16), 0.002, 0.002),
    in_parts("costly parts", (8, 1), (100, 1000), 0.05, 0.05),
    in_parts("small parts", (2, 1), (8, 8), 0.004, 0.003),
    # Lines over shares would swing from one side of a border to the other.
    in_parts("equal devices", (1, 1), (50, 1000), 0.03, 0.03),
    in_parts("costly parts of all", (4, 3, 2), (50, 50, 50), 0.03, 0.03),
    in_parts("two large parts", (4, 3, 2), (100, 1000, 1000), 0.03, 0.03),
]


def run_boa(plant, steps, seed=0):
    policy = make_policy("min_max", plant.num_replicas, plant.batch, micro_batch_sizes=plant.sizes)
    return simulate(policy, plant, steps, seed=seed)


def test_time_of_a_share_in_parts():
    model = MicroBatchTimeModel(0.01, 0.001, 0.004, 50)
    seconds = [model.seconds(samples) for samples in (0, 1, 50, 51, 100, 101)]
    assert seconds == pytest.approx([0.01, 0.011, 0.06, 0.065, 0.114, 0.119])
    with pytest.raises(ValueError, match="at least one sample"):
        MicroBatchTimeModel(0.0, 0.1, 0.0, 0)


def test_shares_of_such_times_equal_brute_force():
    random, full = np.random.default_rng(3), 0
    for _ in range(300):
        n, total = int(random.integers(2, 4)), int(random.integers(4, 25))
        models = [
            MicroBatchTimeModel(
                *(random.integers(0, 6, 2) / 4).tolist(), random.integers(0, 12) / 4, int(m)
            )
            for m in random.integers(1, 9, n)
        ]
        if random.random() < 0.3:
            models[0] = LinearTimeModel(0.5, 0.75)

        def step(shares, models=models):
            return max(m.seconds(b) if b else 0.0 for m, b in zip(models, shares, strict=True))

        best = min(
            step((*head, total - sum(head)))
            for head in itertools.product(range(total + 1), repeat=n - 1)
            if sum(head) <= total
        )
        shares = best_shares(models, total)
        assert shares.sum() == total
        assert step(shares.tolist()) == best
        sizes = [getattr(model, "micro_batch_size", total) for model in models]
        full += any(b and b % m == 0 for b, m in zip(shares.tolist(), sizes, strict=True))
    assert full > 100


def test_a_costly_part_is_not_begun_for_a_few_samples():
    fast, slow = MicroBatchTimeModel(1.0, 1.0, 8.0, 50), LinearTimeModel(1.0, 4.0)
    assert best_shares([fast, slow], 63).tolist() == [50, 13]
    assert best_shares([LinearTimeModel(1.0, 1.0), slow], 65).tolist() == [52, 13]


@pytest.mark.parametrize("part", [0.0, 0.004, 0.01])
def test_jumps_at_the_borders_of_parts_bend_no_slope(part):
    true = MicroBatchTimeModel(0.01, 1e-3, part, 50)
    points = [Measurement(b, true.seconds(b), 9) for b in (20, 45, 55, 90, 120)]
    fixed, found, slope, identified = fit_parts(points, 50, 0.0, 0.0, 0.01)
    assert identified
    assert slope == pytest.approx(1e-3, rel=0.02)
    assert (fixed, found) == pytest.approx((0.01, part), abs=5e-4)


@given(
    points=st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-5, 1e3), st.integers(1, 60)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    ),
    before=st.floats(0, 10),
    fraction=st.floats(0, 1),
    noise=st.floats(0, 1),
    most=st.integers(1, 300),
)
def test_fitted_times_never_fall(points, before, fraction, noise, most):
    measured = [Measurement(*point) for point in points]
    fixed, part, slope, _ = fit_parts(measured, most, before, fraction * before, noise)
    assert fixed >= part >= 0 and slope > 0
    assert np.isfinite([fixed, part, slope]).all()


def test_a_larger_number_of_parts_is_no_change_of_speed():
    true = MicroBatchTimeModel(0.03, 1e-3, 0.03, 50)
    fit = TimeModelFit(1, micro_batch_sizes=[50])
    for share in (20, 50, 60, 40, 110):
        for _ in range(10):
            assert not fit.observe([share], [true.seconds(share)]).any()
    (found,) = fit.models()
    assert found.micro_batch_size == 50
    assert found.part_seconds == pytest.approx(0.03, rel=0.1)
    assert found.seconds_per_sample == pytest.approx(1e-3, rel=0.1)


def test_a_device_three_times_slower_is_found_and_all_its_costs_are():
    true = MicroBatchTimeModel(0.01, 1e-3, 0.008, 50)
    fit = TimeModelFit(1, micro_batch_sizes=[50])
    for share in (20, 40, 90):
        for _ in range(10):
            fit.observe([share], [true.seconds(share)])
    assert sum(fit.observe([90], [3 * true.seconds(90)]).any() for _ in range(10)) == 1
    for share in (20, 40, 90, 120):
        assert fit.seconds(np.array([share])) == pytest.approx([3 * true.seconds(share)], rel=0.1)


@pytest.mark.parametrize("plant", CUT, ids=lambda plant: plant.name)
def test_shares_in_parts_are_balanced_soon(plant):
    run = run_boa(plant, 100)
    assert run.steps_to_balance() <= 20
    assert run.ratio_to_limit(30) >= 0.97
    assert len(run.changes(30)) <= 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plant", CUT[:-3], ids=lambda plant: plant.name)
def test_shares_in_parts_are_balanced_under_noise(plant, seed):
    noisy = dataclasses.replace(plant, noise=0.05, spike_probability=0.01)
    run = run_boa(noisy, 200, seed)
    assert run.ratio_to_limit(50) >= 0.93
    assert len(run.changes(50)) <= 3


def test_a_device_in_parts_that_slows_down_is_balanced():
    slow = in_parts("", (4, 2, 1), (50, 50, 50), 0.01, 0.01, factor=slow_down(0, 3, 60, 140))
    run = run_boa(slow, 200)
    assert run.ratio_to_limit() >= 0.9
    assert run.steps_to_balance(60, 140) <= 20


@pytest.mark.parametrize("plant", STATIC, ids=lambda plant: plant.name)
def test_bounds_that_no_share_reaches_change_nothing(plant):
    noisy = dataclasses.replace(plant, noise=0.05, spike_probability=0.01)
    runs = [
        simulate(
            make_policy("min_max", plant.num_replicas, plant.batch, upper=plant.upper, **options),
            noisy,
            100,
        )
        for options in ({}, {"micro_batch_sizes": [plant.batch] * plant.num_replicas})
    ]
    assert runs[0].shares == runs[1].shares


def test_the_times_survive_a_backup_and_a_log():
    times = MicroBatchTimeModel(0.01, 0.001, 0.004, 50)
    known = {"a": KnownDevice("x", times, 80), "b": KnownDevice("x", LinearTimeModel(0.0, 0.1))}
    assert known_from_json(known_to_json(known)) == known
    plan = BalancePlan(0, "min_max", (80, 20), "", models=(times, None))
    assert plan.to_dict()["models"] == [dataclasses.asdict(times), None]
    policy = make_policy("min_max", 2, 100, micro_batch_sizes=[50, 1000])
    policy.recall([times, LinearTimeModel(0.01, 0.004)])
    assert policy.models == (times, MicroBatchTimeModel(0.01, 0.004, 0.005, 1000))
    assert policy.shares == tuple(best_shares([times, LinearTimeModel(0.01, 0.004)], 100).tolist())
