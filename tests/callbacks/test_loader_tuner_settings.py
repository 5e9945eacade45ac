"""LoaderTuner: trainings that end in an error, its settings, its report, its arguments."""

import json

import keras
import pytest
import tensorflow as tf
from loader_training import (
    BATCH,
    ROWS,
    Eager,
    EveryStep,
    build,
    dense,
    done,
    long,
    moving,
    slow,
    train,
    train_either,
)

import keras_het
from keras_het.callbacks import LoaderTuner
from keras_het.callbacks.data_validation import _Observed
from keras_het.fit.session import FitSession, Rank
from keras_het.loader import Knobs, TunablePipeline, tunable_pipeline
from keras_het.loader.host_threads import LoaderThreads
from keras_het.planning.loader import FixedController, LoaderPlan, WindowSize


class Fails(keras.callbacks.Callback):
    """Ends it in its second step, as Ctrl-C does."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def host_entries(folder):
    return list(folder.glob("*/jobs/*.json"))


@pytest.mark.quick("callbacks0")
@pytest.mark.parametrize("callbacks", [[], [keras.callbacks.History()]])
def test_a_training_that_was_broken_off_leaves_the_next_one_alone(callbacks, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, tuner = dense(), LoaderTuner(Eager)
    with pytest.raises(KeyboardInterrupt):
        model.fit(slow(0.001), verbose=0, callbacks=[tuner, Fails(), *callbacks])
    assert host_entries(tmp_path) == []
    steps = tuner.train_input_wait.steps
    model.fit(slow(0.001), epochs=2, verbose=0, callbacks=callbacks)
    assert tuner.train_input_wait.steps == steps
    assert tuner._session is None
    assert host_entries(tmp_path) == []
    assert tuner.best_settings() is not None


@pytest.mark.quick("evaluate")
@pytest.mark.parametrize("kind", ["evaluate", "predict"])
def test_what_was_broken_off_measures_nothing_more(kind):
    model, tuner = dense(), LoaderTuner(cooperate_with_other_jobs=False)
    run = getattr(model, kind)
    meter = tuner.test_input_wait if kind == "evaluate" else tuner.predict_input_wait
    with pytest.raises(KeyboardInterrupt):
        run(slow(0.001), verbose=0, callbacks=[tuner, Fails()])
    assert meter.steps == 2
    run(slow(0.001), verbose=0)
    assert meter.steps == 2
    run(slow(0.001), verbose=0, callbacks=[tuner])
    assert meter.steps == 2 + 6


def test_an_error_in_a_step_ends_the_tuning_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails_late(row):
        with tf.control_dependencies([tf.debugging.assert_less(row, tf.constant(40, tf.int64))]):
            return tf.fill([3], tf.cast(row, tf.float32)), tf.zeros([1])

    model, tuner = dense(), LoaderTuner(Eager)
    data = tf.data.Dataset.range(ROWS).map(fails_late).batch(BATCH)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(data, verbose=0, callbacks=[tuner])
    assert tuner.train_input_wait.steps >= 8
    assert tuner._session is None
    assert host_entries(tmp_path) == []
    assert tuner.best_settings() is not None


def test_settings_are_code():
    def settings_of(data):
        tuner = moving()
        model = dense()
        model.fit(data, epochs=2, verbose=0, callbacks=[tuner])
        return tuner.best_settings()

    names = {"keras_het": keras_het, "build": build, "tf": tf, "dataset": build(Knobs(2, 2, 2))}
    settings = settings_of(tunable_pipeline(build))
    exec(settings.code, names)
    assert isinstance(names["dataset"], TunablePipeline)
    assert names["dataset"].knobs == settings.knobs
    assert str(settings) == settings.code

    names["dataset"] = build(Knobs(2, 2, 2))
    settings = settings_of(names["dataset"])
    exec(settings.code, names)
    options = names["dataset"].options()
    assert options.threading.private_threadpool_size == settings.knobs.threads
    assert f"# last: prefetch({settings.knobs.prefetch})" in settings.code


@pytest.mark.full
@pytest.mark.parametrize("is_built", [True, False])
def test_the_priority_that_was_measured_is_in_the_settings(is_built, monkeypatch):
    nices = []
    monkeypatch.setattr(
        LoaderThreads, "lower_priority", lambda threads, nice: nices.append(nice) or True
    )
    codes = {}
    for nice in (7, 0):
        tuner = LoaderTuner(EveryStep, nice=nice, cooperate_with_other_jobs=False)
        data = build(Knobs(2, 2, 2))
        train(tunable_pipeline(build, Knobs(2, 2, 2)) if is_built else data, [tuner], epochs=1)
        codes[nice] = tuner.best_settings().code
    assert "nice" not in codes[0]
    (line,) = [line for line in codes[7].splitlines() if "LoaderTuner(" in line]
    nices.clear()
    monkeypatch.setattr(FixedController, "next_window", WindowSize(0, 2, 0.0))
    same = eval(line.removeprefix("#"), {"keras_het": keras_het})
    knobs = Knobs(4, 2, 2)
    train(tunable_pipeline(build, knobs), [same], epochs=1)
    assert same.moves == []
    assert same.best_settings().knobs == knobs
    assert nices[-1] == 7


@pytest.mark.full
@pytest.mark.parametrize("prefetches", [True, False])
def test_a_prefetch_that_was_not_tuned_is_no_setting(prefetches, devices):
    rows = tf.data.Dataset.range(ROWS).shuffle(20, seed=7)
    data = rows.map(lambda row: (tf.fill([3], 0.1), tf.cast(row, tf.float32))).batch(BATCH)
    tuner = moving()
    train_either(devices, data.prefetch(tf.data.AUTOTUNE) if prefetches else data, [tuner])
    code = tuner.best_settings().code
    assert "private_threadpool_size" in code
    assert "prefetch" not in code


class Unconfirmed(EveryStep):
    """Moves twice; only the first move, or only the first plan, is confirmed."""

    kept = 1

    def __init__(self, plan, cpus):
        super().__init__(plan, cpus)
        self.tried = [plan]

    @property
    def confirmed_plan(self):
        return self.tried[min(self.kept, len(self.tried) - 1)]

    def observe(self, window):
        if len(self.tried) == 3:
            return None
        self.tried.append(super().observe(window))
        return self.tried[-1]


class NothingConfirmed(Unconfirmed):
    kept = 0


@pytest.mark.quick("alone-Unconfirmed-expected0")
@pytest.mark.parametrize(
    ("controller", "expected"), [(Unconfirmed, Knobs(10, 3, 5)), (NothingConfirmed, Knobs(3, 2, 2))]
)
def test_a_move_that_was_not_confirmed_is_no_setting(controller, expected, devices):
    tuner = LoaderTuner(controller, cooperate_with_other_jobs=False)
    tf.random.set_seed(5)
    train_either(devices, tunable_pipeline(long, Knobs(3, 2, 2)), [tuner])
    assert [move.plan for move in done(tuner)] == [LoaderPlan(5, 3), LoaderPlan(1, 1)]
    # the buffer of a strategy's data path stays as long as it was
    assert tuner.best_settings().knobs == expected


def test_settings_need_a_training():
    with pytest.raises(RuntimeError, match="Call fit"):
        LoaderTuner().best_settings()
    with pytest.raises(RuntimeError, match="within fit"):
        LoaderTuner().inspect()


class ShowsAll(keras.callbacks.Callback):
    """Has the steps read what `DataValidation(compare_shards=True)` gives them."""

    def __init__(self, tuner):
        super().__init__()
        self.tuner, self.errors = tuner, []

    def on_train_begin(self, logs=None):
        FitSession.of(self.model).add_layer(
            Rank.VALIDATE_DATA, lambda step, iterator: step(_Observed(iterator, id))
        )

    def on_train_batch_end(self, batch, logs=None):
        with pytest.raises(RuntimeError) as error:
            self.tuner.inspect()
        self.errors.append(str(error.value))


@pytest.mark.quick("alone")
def test_what_looks_at_every_batch_is_named(devices):
    tuner = LoaderTuner(cooperate_with_other_jobs=False)
    shows = ShowsAll(tuner)
    train_either(devices, build(Knobs(2, 2, 2)), [tuner, shows], epochs=1)
    for text in (tuner.observe_only_reason, tuner.best_settings().code, *shows.errors):
        assert "DataValidation(compare_shards=True) looks at every batch" in text
        assert "strategy" not in text
    assert tuner.train_input_wait.steps == len(shows.errors) > 0


@pytest.mark.full
def test_everything_is_kept_as_json(tmp_path):
    tuner = moving()
    train(tunable_pipeline(build), [tuner], epochs=2)
    tuner.save(tmp_path / "loader.json")
    kept = json.loads((tmp_path / "loader.json").read_text())
    assert kept["train"]["steps"] == tuner.train_input_wait.steps
    assert len(kept["moves"]) == len(tuner.moves) > 0
    assert kept["moves"][0]["plan"]["loaders"] == 5


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="max_reader_threads=8, cooperate_with_other_jobs=False"):
        LoaderTuner(max_reader_threads=8, cooperate_with_other_jobs=False)
    with pytest.raises(TypeError, match="build must return"):
        tunable_pipeline(lambda knobs: [1, 2])
