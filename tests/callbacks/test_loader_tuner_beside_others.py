"""LoaderTuner beside callbacks that touch the same step functions, and steps that are not fit's."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from loader_training import (
    ROWS,
    STEPS,
    EveryStep,
    build,
    dense,
    done,
    long,
    moving,
    slow,
    train,
    train_under_strategy,
)

from keras_het.callbacks import BatchBalancer, LoaderTuner
from keras_het.loader import Knobs, pipeline
from keras_het.planning.loader import WindowSize

EXTRA = -1.0


class FitsWithin(keras.callbacks.Callback):
    """Trains the same model on something else, within an epoch and at its end."""

    def on_train_batch_end(self, batch, logs=None):
        if batch in (4, 8):
            self.fit_extra()

    def on_epoch_end(self, epoch, logs=None):
        self.fit_extra()

    def fit_extra(self):
        x, y = np.ones((2, 3), "float32"), np.full(2, EXTRA, "float32")
        self.model.fit(x, y, batch_size=2, verbose=0)


class Losses(keras.callbacks.History):
    """A user's own history, which also has the loss of each batch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def in_epochs(seen):
    return [np.concatenate(seen[start : start + STEPS]) for start in range(0, len(seen), STEPS)]


def data_of(is_built):
    return pipeline(build) if is_built else build(pipeline(build).knobs)


@pytest.mark.quick("True-True", "False-False")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("is_built", [True, False])
def test_a_fit_of_the_same_model_within_a_callback_ends_nothing(first, is_built):
    tuner = moving()
    model = train(lambda: data_of(is_built), [tuner, FitsWithin()][:: 1 if first else -1])
    trained = [labels for labels in model.seen if labels != [EXTRA, EXTRA]]
    assert len(model.seen) - len(trained) == 9
    assert len(trained) == 3 * STEPS
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in in_epochs(trained))
    assert tuner.meter.steps == 3 * STEPS
    assert tuner.observes_only is None
    assert len(done(tuner)) >= 2


class EvaluatesAnother(keras.callbacks.Callback):
    """Evaluates another model with the same LoaderTuner, within an epoch and at its end."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner = tuner

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            dense().evaluate(slow(0.0), verbose=0, callbacks=[self.tuner])

    def on_epoch_end(self, epoch, logs=None):
        dense().evaluate(slow(0.0), verbose=0, callbacks=[self.tuner])


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_built", [True, False])
def test_another_model_may_be_evaluated_with_the_same_tuner(is_built):
    tuner = moving()
    model = train(lambda: data_of(is_built), [tuner, EvaluatesAnother(tuner)])
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in in_epochs(model.seen))
    assert tuner.meter.steps == len(model.seen) == 3 * STEPS


class FitsWithTheTuner(keras.callbacks.Callback):
    """Trains another model with the same LoaderTuner."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner = tuner

    def on_train_batch_end(self, batch, logs=None):
        dense().fit(slow(0.0), verbose=0, callbacks=[self.tuner])


def test_one_tuner_in_a_fit_within_its_fit_is_refused():
    tuner = LoaderTuner(share_host=False)
    with pytest.raises(RuntimeError, match=r"same LoaderTuner.*one of its own"):
        dense().fit(slow(0.0), verbose=0, callbacks=[tuner, FitsWithTheTuner(tuner)])
    before = tuner.meter.steps
    other = FitsWithTheTuner(LoaderTuner(share_host=False))
    dense().fit(slow(0.0), verbose=0, callbacks=[tuner, other])
    assert tuner.meter.steps == before + 6


class FitsAtTheEnd(FitsWithTheTuner):
    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_train_end(self, logs=None):
        super().on_train_batch_end(0)


def test_one_tuner_that_has_ended_serves_a_fit_at_the_end_of_its_fit():
    tuner = LoaderTuner(share_host=False)
    dense().fit(slow(0.0), verbose=0, callbacks=[tuner, FitsAtTheEnd(tuner)])
    assert tuner.meter.steps == 2 * 6


def test_a_history_of_the_user_sees_every_batch():
    losses = Losses()
    tuner = LoaderTuner(share_host=False)
    dense().fit(slow(0.0), verbose=0, callbacks=[losses, tuner])
    assert len(losses.losses) == 6
    assert tuner.meter.steps == 6


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False])
def test_beside_the_balancer_in_any_order(first, logical_devices):
    tuner, balancer = moving(), BatchBalancer("even")
    callbacks = [tuner, balancer] if first else [balancer, tuner]
    train_under_strategy(logical_devices, pipeline(long), callbacks)
    assert tuner.meter.steps == 3 * 60
    assert len(done(tuner)) >= 2
    assert balancer.measurements


class Patiently(EveryStep):
    """Measures in one window that no epoch fills."""

    def __init__(self, plan, cpus):
        super().__init__(plan, cpus)
        self.next_window = WindowSize(0, 10**6, 3600.0)


class LooksAtValidation(keras.callbacks.Callback):
    """Whether the host is measured when a validation begins."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner, self.is_measured = tuner, []

    def on_test_begin(self, logs=None):
        self.is_measured.append(not self.tuner._session._sums.is_skipping)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_validation_is_in_no_window_also_behind_an_epoch_of_unknown_length(is_known):
    tuner = LoaderTuner(Patiently, share_host=False)
    looks = LooksAtValidation(tuner)
    data = build(Knobs(2, 2, 2))
    data = data if is_known else data.filter(lambda *batch: True)
    train(data, [tuner, looks], validation_data=slow(0.0))
    assert looks.is_measured == [False] * 3
