"""What `roles="auto"` measures, and makes of it."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from addresses import free_address

import keras_het
from keras_het import rules
from keras_het.asynchronous.exchange import role_choice
from keras_het.asynchronous.exchange.participant import HybridOptions
from keras_het.asynchronous.exchange.role_choice import (
    LARGEST_NOISE_SCALE,
    ExchangeTimes,
    RoleChoice,
    measure_exchange,
    measure_link_rates,
    noise_scale_of,
)
from keras_het.exchange.server import Server
from keras_het.strategy.measure.compute_times import StepTimes

DIMENSIONS = 50


def steps(count, shares, gradient, deviation):
    """Steps whose samples have gradients of one mean and of independent, equal deviations."""
    random = np.random.default_rng(0)
    for _ in range(count):
        own = [gradient + random.normal(0, deviation / np.sqrt(b), DIMENSIONS) for b in shares]
        mean = np.average(own, axis=0, weights=shares)
        yield step(shares, [g @ g for g in own], mean @ mean)


def step(shares, squares, global_square):
    return StepTimes(
        shares=np.array(shares),
        mean_shares=np.array(shares, float),
        seconds=np.ones(len(shares)),
        wanted_shares=np.zeros(len(shares), int),
        fitting=np.zeros(len(shares), int),
        gradient_squares=np.array(squares, float),
        global_gradient_square=float(global_square),
    )


@pytest.mark.parametrize("shares", [(8, 8), (20, 4, 8)])
def test_noise_scale_of_known_gradients(shares):
    gradient = np.full(DIMENSIONS, 0.1)
    expected = DIMENSIONS * 0.5**2 / (gradient @ gradient)
    measured = noise_scale_of(list(steps(4000, shares, gradient, 0.5)))
    assert measured == pytest.approx(expected, rel=0.1)


def test_noise_scale_at_its_bounds():
    # |G|^2 = 2 |g|^2 - (|g_1|^2 + |g_2|^2) / 2 < 0: staleness is free
    assert noise_scale_of([step((4, 4), (1.0, 1.0), 0.4)]) == LARGEST_NOISE_SCALE
    # one replica shows no noise
    assert noise_scale_of(list(steps(3, (8,), np.ones(DIMENSIONS), 1.0))) is None


class FakeStrategy:
    """Two workers of one device each, of which one step was measured."""

    layout = SimpleNamespace(replicas_per_worker=(1, 1))

    def __init__(self):
        measured = [step((6, 2), (3.0, 5.0), 2.0)]
        data = SimpleNamespace(cardinality=40, takes_keras_arrays=False)
        self.extended = SimpleNamespace(
            gather_over_workers=lambda values: values,
            compute_times=SimpleNamespace(latest=lambda count: measured, begin=self._begin),
            data_path=SimpleNamespace(to_be_trained=lambda: data),
        )
        self.measured = []

    def _begin(self, model, gradients=False, stops=False):
        assert stops  # else nobody could end it
        self.measured.append(gradients)


def speeds_of(monkeypatch, known=None, **options):
    seen = []

    def advise(speeds):
        seen.append(speeds)
        return real(speeds)

    real = role_choice.advise_roles
    monkeypatch.setattr(role_choice, "advise_roles", advise)
    monkeypatch.setattr(role_choice, "measure_link_rates", lambda strategy: (1e8, 1e8))
    times = ExchangeTimes(all_reduce_seconds=0.004, busy_seconds=0.008)
    monkeypatch.setattr(role_choice, "measure_exchange", lambda *_: times)
    strategy, model = FakeStrategy(), SimpleNamespace(trainable_variables=[np.zeros([5, 2])])
    hybrid = HybridOptions(**({"rule": rules.get("delta", num_workers=2)} | options))
    choice = RoleChoice(model, strategy, hybrid, profile_steps=1, noise_scale=known)
    assert choice.steps_done(4) is None
    assert choice.steps_done(1) is not None
    assert len(seen) == 1
    assert strategy.measured == [known is None]
    return seen[0]


@pytest.mark.parametrize("known", [None, 700.0])
def test_the_plan_is_made_for_the_noise_scale(monkeypatch, known):
    # S = (6 * 3 + 2 * 5 - 8 * 2) / 1, |G|^2 = 2 * 2 - (6 * 3 + 2 * 5) / 8; it is taken to double
    expected = 2 * 12 / 0.5 if known is None else known
    assert speeds_of(monkeypatch, known).noise_scale == pytest.approx(expected)


def test_the_plan_is_made_for_the_training_that_follows(monkeypatch):
    speeds = speeds_of(monkeypatch, period=3, async_batch_size=5)
    assert speeds.hop_seconds == pytest.approx(0.002, rel=1e-3)  # there and back, beside 40 bytes
    exchange = speeds.exchange
    assert (exchange.period, exchange.async_batch_size, exchange.busy_seconds) == (3, 5, 0.008)
    assert not exchange.sends_gradients and exchange.num_batches == 40
    gradients = rules.AsyncSGD(learning_rate=0.1)
    exchange = speeds_of(monkeypatch, rule=gradients, adapts_period=True).exchange
    assert exchange.period is None and exchange.sends_gradients


def test_times_of_an_exchange():
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    before = model.get_weights()
    layout = SimpleNamespace(local_replicas=range(1, 3))
    others = np.array([[0.5, 3.0, 40.0]])  # what another worker waited, and its time to read
    several = SimpleNamespace(  # stands in for two workers
        layout=layout,
        scope=strategy.scope,
        experimental_local_results=strategy.experimental_local_results,
        extended=SimpleNamespace(gather_over_workers=lambda own: np.concatenate([own, others])),
    )
    ticks = itertools.count()  # each run takes one second
    # of two replicas that are here the second one takes longer: 2 and 1 seconds are waited
    steps = [
        dataclasses.replace(
            step((8, 8, 8), (1.0,) * 3, 1.0),
            seconds=np.array([9.0, 1.0, slower]),
            collective_seconds=waited,
        )
        for slower, waited in ((1.5, 2.5), (4.0, 4.0))
    ]
    found = measure_exchange(model, several, 1000, steps, lambda: float(next(ticks)))
    assert found == ((0.5 + 1.0) / 2, 4.0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


def test_all_find_the_same_link_rates_and_the_leader_the_fastest(logical_devices, monkeypatch):
    monkeypatch.setenv("KERAS_HET_SECRET", "a secret that only tests know")
    address, barrier, given = free_address(), threading.Barrier(3, timeout=60), [None] * 3

    def work(worker):
        def gather(value):
            given[worker] = value
            barrier.wait()
            everyone = np.concatenate(given)
            barrier.wait()
            return everyone

        strategy = SimpleNamespace(
            num_workers=3,
            worker_index=worker,
            is_chief=worker == 0,
            extended=SimpleNamespace(
                gather_over_workers=gather,
                cluster_config=SimpleNamespace(service_address=lambda: address),
            ),
        )
        return measure_link_rates(strategy)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(work, range(3))
    assert others == [first, first]
    leader, *rates = first
    assert leader == max(rates) and min(rates) > 0
    Server(address).close()  # the leader's port is free again
