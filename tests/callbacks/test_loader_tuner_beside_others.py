"""LoaderTuner beside other callbacks, and steps that are not those of its fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruption import Interruption
from loader_training import (
    ROWS,
    STEPS,
    EveryStep,
    Patient,
    build,
    dense,
    done,
    moving,
    slow,
    train,
)

import keras_het
from keras_het.callbacks import AsyncWorkers, BackupAndRestore, LoaderTuner
from keras_het.loader import Knobs, tunable_pipeline
from keras_het.planning.loader import WindowSize

EXTRA = -1.0
KNOBS = Knobs(2, 2, 2)


class FitsWithin(keras.callbacks.Callback):
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
    return tunable_pipeline(build) if is_built else build(tunable_pipeline(build).knobs)


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("is_built", [True, False])
def test_a_fit_of_the_same_model_within_a_callback_ends_nothing(first, is_built):
    tuner = moving()
    model = train(lambda: data_of(is_built), [tuner, FitsWithin()][:: 1 if first else -1])
    trained = [labels for labels in model.seen if labels != [EXTRA, EXTRA]]
    assert len(model.seen) - len(trained) == 9
    assert len(trained) == 3 * STEPS
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in in_epochs(trained))
    assert tuner.train_input_wait.steps == 3 * STEPS
    assert tuner.observe_only_reason is None
    assert len(done(tuner)) >= 2
    assert tuner.best_settings().knobs.threads >= 1


def evaluates_another(tuner):
    """Within an epoch and at its end."""

    def evaluate(batch=4, logs=None):
        if batch == 4:
            dense().evaluate(slow(0.0), verbose=0, callbacks=[tuner])

    ends = {"on_train_batch_end": evaluate, "on_epoch_end": lambda epoch, logs: evaluate()}
    return keras.callbacks.LambdaCallback(**ends)


@pytest.mark.full
@pytest.mark.parametrize("is_built", [True, False])
def test_another_model_may_be_evaluated_with_the_same_tuner(is_built):
    tuner = moving()
    model = train(lambda: data_of(is_built), [tuner, evaluates_another(tuner)])
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in in_epochs(model.seen))
    assert tuner.train_input_wait.steps == len(model.seen) == 3 * STEPS


def fits_with(tuner, event="on_train_batch_end"):
    def fit(*_, **logs):
        dense().fit(slow(0.0), verbose=0, callbacks=[tuner])

    return keras.callbacks.LambdaCallback(**{event: fit})


@pytest.mark.full
def test_one_tuner_in_a_fit_within_its_fit_is_refused():
    tuner = LoaderTuner(cooperate_with_other_jobs=False)
    with pytest.raises(RuntimeError, match=r"same LoaderTuner.*another one"):
        dense().fit(slow(0.0), verbose=0, callbacks=[tuner, fits_with(tuner)])
    before = tuner.train_input_wait.steps
    other = fits_with(LoaderTuner(cooperate_with_other_jobs=False))
    dense().fit(slow(0.0), verbose=0, callbacks=[tuner, other])
    assert tuner.train_input_wait.steps == before + 6


def test_one_tuner_that_has_ended_serves_a_fit_at_the_end_of_its_fit():
    tuner = LoaderTuner(cooperate_with_other_jobs=False)
    dense().fit(slow(0.0), verbose=0, callbacks=[tuner, fits_with(tuner, "on_train_end")])
    assert tuner.train_input_wait.steps == 2 * 6


def test_a_history_of_the_user_sees_every_batch():
    losses = Losses()
    tuner = LoaderTuner(cooperate_with_other_jobs=False)
    dense().fit(slow(0.0), verbose=0, callbacks=[losses, tuner])
    assert len(losses.losses) == 6
    assert tuner.train_input_wait.steps == 6


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


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_known", [True, False])
def test_a_validation_is_in_no_window_also_behind_an_epoch_of_unknown_length(is_known):
    tuner = LoaderTuner(Patiently, cooperate_with_other_jobs=False)
    looks = LooksAtValidation(tuner)
    data = build(Knobs(2, 2, 2))
    data = data if is_known else data.filter(lambda *batch: True)
    train(data, [tuner, looks], validation_data=slow(0.0))
    assert looks.is_measured == [False] * 3


def seeded(is_builder):
    tf.random.set_seed(5)
    return tunable_pipeline(build, KNOBS) if is_builder else build(KNOBS)


def trained(strategy, data, callbacks):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    return [np.array(variable) for variable in (*model.weights, *model.optimizer.variables)]


def beside(other, tuner_is_first):
    """A tuner that moves, and the callbacks of a fit with it and another one."""
    tuner = moving()
    return tuner, [*[tuner, other][:: 1 if tuner_is_first else -1], Patient(tuner)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("is_builder", [True, False], ids=["builder", "dataset"])
@pytest.mark.parametrize("tuner_is_first", [True, False], ids=["tuner first", "hybrid first"])
def test_a_hybrid_training_is_observed_only(strategy, is_builder, tuner_is_first):
    """It says why, and changes nothing."""
    alone = [AsyncWorkers("delta", period=2)]
    expected = trained(strategy, seeded(is_builder), alone)
    tuner, callbacks = beside(AsyncWorkers("delta", period=2), tuner_is_first)
    assert_equal(trained(strategy, seeded(is_builder), callbacks), expected)
    assert tuner.train_input_wait.steps == 3 * STEPS
    assert "async workers" in tuner.observe_only_reason
    assert not done(tuner)


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "tuner_is_first"),
    [
        pytest.param(20, True, id="in the second epoch, tuner first"),
        pytest.param(31, False, id="in the third, backup first"),
    ],
)
@pytest.mark.parametrize("is_builder", [True, False], ids=["builder", "dataset"])
def test_a_tuned_training_continues_from_its_backup(
    logical_devices, tmp_path, is_builder, step, tuner_is_first
):
    def train(*callbacks):
        strategy = keras_het.HeterogeneousStrategy(list(logical_devices[:2]), share_weights=[3, 1])
        return trained(strategy, seeded(is_builder), callbacks)

    def with_backup():
        return beside(BackupAndRestore(str(tmp_path / "backup"), save_freq=2), tuner_is_first)

    expected = train()
    first, callbacks = with_backup()
    with pytest.raises(InterruptedError):
        train(*callbacks, Interruption(step))
    assert done(first)
    second, callbacks = with_backup()
    assert_equal(train(*callbacks), expected)
    assert done(second)
