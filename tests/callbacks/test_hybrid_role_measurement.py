"""The steps that `roles="auto"` measures in a `fit`, and those after them."""

import logging

import numpy as np
import pytest
from small_training import BATCH, NUM_BATCHES, arrays, data, make_model

import keras_het
from keras_het.asynchronous.exchange import role_choice
from keras_het.asynchronous.exchange.role_choice import ExchangeTimes
from keras_het.callbacks import AsyncWorkers, BatchBalancer, async_workers
from keras_het.strategy.measure.compute_times import CAPACITY

MEASURED_STEPS = 4  # of 8 that it takes


class Several:
    """A strategy of one worker that says it is one of two, so that roles are chosen."""

    num_workers = 2

    def __init__(self, strategy):
        self._strategy = strategy

    def __getattr__(self, name):
        return getattr(self._strategy, name)


@pytest.fixture
def strategy(monkeypatch, logical_devices, caplog):
    """Of one worker with two replicas; what it would measure of others stands in for them."""
    caplog.set_level(logging.WARNING, "keras_het")
    strategy = keras_het.HeterogeneousStrategy(logical_devices[:2])
    several = Several(strategy)
    monkeypatch.setattr(async_workers, "heterogeneous_strategy", lambda *_: several)
    monkeypatch.setattr(role_choice, "measure_link_rates", lambda strategy: (1e8,))
    times = ExchangeTimes(all_reduce_seconds=0.008, busy_seconds=0.004)
    monkeypatch.setattr(role_choice, "measure_exchange", lambda *_: times)
    return strategy


def fit(model, epochs, *others, **given):
    hybrid = AsyncWorkers(roles="auto", profile_steps=MEASURED_STEPS)
    given = given or {"x": data()}
    model.fit(**given, epochs=epochs, verbose=0, callbacks=[hybrid, *others])


def measured_steps(strategy):
    return len(strategy.extended.compute_times.read_new())


def has_gradient_squares(strategy):
    return [
        bool(step.gradient_squares.any())
        for step in strategy.extended.compute_times.latest(CAPACITY)
    ]


@pytest.mark.full
def test_a_fit_that_is_too_short_says_so_and_the_next_one_chooses(strategy, caplog):
    model = make_model(strategy)
    fit(model, 1)
    assert "needs 8 steps" in caplog.text and "Received: a fit of 6," in caplog.text
    assert not strategy.extended.compute_times.is_measuring
    caplog.clear()
    fit(model, 2)
    assert caplog.text.count("Measured for roles: balanced") == 1
    caplog.clear()
    fit(model, 2)
    assert "roles" not in caplog.text and "needs" not in caplog.text


@pytest.mark.full
def test_fits_that_are_too_short_do_not_measure_for_ever(strategy, caplog):
    model = make_model(strategy)
    for _ in range(5):
        fit(model, 1)
    left = [each.rpartition(": ")[2] for each in caplog.messages if "to exchange" not in each]
    assert left == [f"{number} more fits measure." for number in (2, 1, 0)]


@pytest.mark.full
def test_nothing_is_measured_after_the_plan(strategy):
    model = make_model(strategy)
    fit(model, 2)
    assert measured_steps(strategy) == 8
    times = strategy.extended.compute_times
    assert not times.is_measuring and not times.is_measuring_gradients
    model.fit(data(), verbose=0)
    assert not measured_steps(strategy)
    balancer = BatchBalancer("even")  # asks again
    model.fit(data(), verbose=0, callbacks=[balancer])
    assert len(balancer.measurements) == NUM_BATCHES


@pytest.mark.full
def test_a_balancer_keeps_measuring_after_the_plan_without_the_gradients(strategy):
    balancer, model = BatchBalancer("even"), make_model(strategy)
    fit(model, 2, balancer)
    assert strategy.extended.compute_times.is_measuring
    assert len(balancer.measurements) == 2 * NUM_BATCHES
    assert has_gradient_squares(strategy) == [True] * 8 + [False] * 4
    model.fit(data(), verbose=0, callbacks=[BatchBalancer("even")])
    assert has_gradient_squares(strategy)[-NUM_BATCHES:] == [False] * NUM_BATCHES


def test_data_that_could_not_be_shared_is_refused_before_anything_is_measured(strategy):
    unknown = data().filter(lambda x, y: True)
    model = make_model(strategy)
    with pytest.raises(ValueError, match="number of batches must be known"):
        model.fit(unknown, verbose=0, callbacks=[AsyncWorkers(roles="auto")])
    assert np.array(model.optimizer.iterations) == 0


@pytest.mark.full
def test_roles_are_chosen_in_a_fit_of_arrays(strategy, caplog):
    x, y = arrays()
    fit(make_model(strategy), 2, x=x, y=y, batch_size=BATCH)
    assert caplog.text.count("Measured for roles: balanced") == 1
