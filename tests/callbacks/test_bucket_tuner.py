"""`BucketTuner` tries sizes in turns, and stays with the fastest one; a clock of ours tells."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from small_training import BATCH, NUM_BATCHES, arrays, data, flat, make_model

import keras_het
from keras_het.callbacks import BatchBalancer, BucketTuner, LocalTraining, bucket_tuner
from keras_het.callbacks.bucket_tuner import ONE_SUM, fastest, sizes_to_try, typical_seconds

SIZES = [64, 8]
STEPS = 3
IN_A_BLOCK = STEPS + bucket_tuner.NUM_LEFT_OUT
LONG = bucket_tuner.NUM_ROUNDS * (len(SIZES) + 1) * IN_A_BLOCK
ONCE_EACH = [ONE_SUM, ONE_SUM, 64, 64, 8, 8]
FASTEST_8, ONE_IS_FASTEST = {0: 3.0, 64: 2.0, 8: 1.0}, {0: 1.0, 64: 2.0, 8: 1.5}


class Clock(keras.callbacks.Callback):
    """Lets an execution take as long as its bucket size says, and a pause between epochs."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.now, self.executions = seconds, 0.0, []
        self.functions = set()

    def on_epoch_end(self, epoch, logs=None):
        self.now += 1000.0

    def on_train_batch_end(self, batch, logs=None):
        size = self.model.distribute_strategy.extended.bytes_per_bucket
        self.executions.append(size)
        self.functions.add((size, id(vars(self.model)["train_function"])))
        self.now += self.seconds[size]

    def time_computed(self, logs):
        assert all(isinstance(each, float) for each in dict(logs).values())
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(FASTEST_8)
    monkeypatch.setattr(bucket_tuner, "_time_computed", clock.time_computed)
    return clock


@pytest.fixture
def traces(monkeypatch):
    """The bucket size of each trace of a train step, twice: two replicas trace."""
    traced, original = [], keras.Model.train_step

    def train_step(model, batch):
        traced.append(model.distribute_strategy.extended.bytes_per_bucket)
        return original(model, batch)

    monkeypatch.setattr(keras.Model, "train_step", train_step)
    return traced


def build(num_devices=2, **options):
    strategy = keras_het.HeterogeneousStrategy(
        DEVICES[:num_devices], share_weights=(3, 1)[:num_devices]
    )
    return make_model(strategy, keras.optimizers.Adam, jit_compile=False, **options)


def fit(model, *callbacks, epochs, **options):
    return model.fit(data(), epochs=epochs, callbacks=list(callbacks), verbose=0, **options)


def epochs_of(steps, in_epoch=NUM_BATCHES):
    return -(-steps // in_epoch)


def test_it_stays_with_the_fastest_size_and_changes_no_bit(clock, traces, capsys):
    model, tuner = build(), BucketTuner(SIZES, steps=STEPS, verbose=1)
    tuned = fit(model, clock, tuner, epochs=2 * epochs_of(LONG))
    assert tuner.size == 8
    assert tuner.step_seconds == {ONE_SUM: 3.0, 64: 2.0, 8: 1.0}
    assert traces == ONCE_EACH
    in_turns = [size for size, _ in itertools.groupby(clock.executions)]
    assert in_turns == [ONE_SUM, 64, 8] * bucket_tuner.NUM_ROUNDS
    text = "gradients travel in buckets of 8 bytes (3000.00 ms in one sum, "
    assert f"\nBucketTuner: {text}" in capsys.readouterr().out
    assert model.distribute_strategy.extended.bytes_per_bucket == ONE_SUM
    weights = flat(model)
    clock.executions.clear()
    fit(model, clock, tuner, epochs=1)  # continues with that size
    assert set(clock.executions) == {8} and traces == ONCE_EACH
    plain = build()
    expected = fit(plain, epochs=2 * epochs_of(LONG))
    np.testing.assert_array_equal(weights, flat(plain))
    assert tuned.history["loss"] == expected.history["loss"]


@pytest.mark.full
def test_one_sum_stays_where_it_is_fastest(clock, traces):
    clock.seconds = ONE_IS_FASTEST
    tuner = BucketTuner(SIZES, steps=STEPS)
    fit(build(), clock, tuner, epochs=2 * epochs_of(LONG))
    assert tuner.size == ONE_SUM and clock.executions[-1] == ONE_SUM
    assert len(clock.functions) == len({each for _, each in clock.functions}) == 3
    assert traces == ONCE_EACH


@pytest.mark.full
def test_the_next_fit_uses_the_same_size_without_a_trace(clock, traces):
    model, tuner = build(), BucketTuner(SIZES, steps=STEPS)
    fit(model, clock, tuner, epochs=2 * epochs_of(LONG))
    fit(model, clock, tuner, epochs=1)
    assert tuner.size == 8 and traces == ONCE_EACH
    other = make_model(model.distribute_strategy, jit_compile=False)
    fit(other, clock, tuner, epochs=1)
    assert tuner.size is None  # of another model


@pytest.mark.full
def test_a_trial_that_was_not_finished_starts_again(clock, traces):
    model, tuner = build(), BucketTuner(SIZES, steps=STEPS)
    fit(model, clock, tuner, epochs=epochs_of(IN_A_BLOCK + 3))
    assert tuner.size is None and clock.executions[-1] == 8
    assert model.distribute_strategy.extended.bytes_per_bucket == ONE_SUM
    clock.executions.clear()
    fit(model, clock, epochs=1)
    assert set(clock.executions) == {ONE_SUM}  # without it, as ever
    assert traces == ONCE_EACH
    fit(model, clock, tuner, epochs=2 * epochs_of(LONG))
    assert tuner.size == 8 and traces == ONCE_EACH


@pytest.mark.full
@pytest.mark.parametrize("is_known", [True, False])
def test_epochs_may_be_shorter_than_a_block(clock, is_known):
    def batches():
        x, y = arrays()
        for start in range(0, 3 * BATCH, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))
    three = tf.data.Dataset.from_generator(batches, output_signature=spec)
    three = three.apply(tf.data.experimental.assert_cardinality(3)) if is_known else three
    model, tuner = build(), BucketTuner(SIZES, steps=4)
    model.fit(three, epochs=60, callbacks=[clock, tuner], verbose=0)
    assert tuner.step_seconds == {ONE_SUM: 3.0, 64: 2.0, 8: 1.0}


@pytest.mark.full
def test_a_validation_is_no_part_of_a_step(clock):
    class Validates(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            clock.now += 500.0

    tuner = BucketTuner(SIZES, steps=STEPS)
    fit(build(), clock, Validates(), tuner, epochs=2 * epochs_of(LONG), validation_data=data())
    assert tuner.step_seconds == {ONE_SUM: 3.0, 64: 2.0, 8: 1.0}


@pytest.mark.full
def test_executions_of_several_steps(clock):
    tuner, model = BucketTuner(SIZES, steps=STEPS), build(steps_per_execution=2)
    fit(model, clock, tuner, epochs=2 * epochs_of(LONG, NUM_BATCHES // 2))
    plain = build(steps_per_execution=2)
    fit(plain, epochs=2 * epochs_of(LONG, NUM_BATCHES // 2))
    assert tuner.size == 8
    np.testing.assert_array_equal(flat(model), flat(plain))


@pytest.mark.full
def test_functions_that_another_callback_makes_are_used(clock):
    class Makes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch % 3 == 1:
                self.model.make_train_function(force=True)
                self.made = vars(self.model)["train_function"]

    makes, tuner = Makes(), BucketTuner(SIZES, steps=STEPS)
    model = build()
    fit(model, clock, tuner, makes, epochs=2)
    assert vars(model)["train_function"] is not makes.made or tuner._block is None
    fit(model, clock, tuner, makes, epochs=2 * epochs_of(LONG))
    assert tuner.size == 8


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"devices": DEVICES[:1]}, []),
        ({"devices": DEVICES[:2], "micro_batch_size": 1}, []),
        ({"devices": DEVICES[:2], "micro_batch_size": "auto"}, [BatchBalancer("even")]),
    ],
    ids=["one replica", "parts", "parts where needed"],
)
def test_nothing_is_tried_where_sizes_make_no_difference(clock, traces, options, more):
    model = make_model(keras_het.HeterogeneousStrategy(**options), jit_compile=False)
    tuner = BucketTuner(SIZES, steps=1)
    fit(model, clock, tuner, *more, epochs=2)
    assert tuner.size == ONE_SUM and set(traces) == {ONE_SUM}


@pytest.mark.full
def test_small_models_have_nothing_to_try():
    tuner = BucketTuner()
    fit(build(), tuner, epochs=1)
    assert tuner.size == ONE_SUM and tuner.step_seconds == {}


@pytest.mark.full
def test_the_size_of_the_strategy_comes_first(clock):
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=64)
    strategy = keras_het.HeterogeneousStrategy(DEVICES[:2], communication_options=options)
    model = make_model(strategy, jit_compile=False)
    clock.seconds, tuner = {0: 2.0, 64: 2.01, 8: 2.01}, BucketTuner([8], steps=STEPS)
    fit(model, clock, tuner, epochs=2 * epochs_of(LONG))
    assert tuner.size == 64 and clock.executions[0] == 64  # another gains less than 2 %
    assert strategy.extended.bytes_per_bucket == 64


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_beside_a_balancer(clock, monkeypatch, asynchronous):
    """Steps that are measured have a function of their own, for each size."""
    device = {"speed": 1.0, "fixed_seconds": 0.0005, "seconds_per_sample": 0.0001}
    device["asynchronous"] = asynchronous
    devices = [device, {**device, "seconds_per_sample": 0.0004}]
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    made, original = [], keras.Model.make_train_function

    def make_train_function(model, force=False):
        made.append(force)
        return original(model, force)

    monkeypatch.setattr(keras.Model, "make_train_function", make_train_function)
    model, tuner, balancer = build(), BucketTuner(SIZES, steps=STEPS), BatchBalancer()
    fit(model, clock, balancer, tuner, epochs=2 * epochs_of(LONG))
    assert tuner.size == 8 and balancer.plans
    assert sum(made) <= 1 + 2 * len(tuner.step_seconds)


def test_it_needs_our_strategy():
    model = make_model(tf.distribute.get_strategy())
    with pytest.raises(ValueError, match=r"BucketTuner needs a model that was built under"):
        fit(model, BucketTuner(), epochs=1)
    assert LocalTraining.__name__ == "LocalTraining"  # the name that it looks for


MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (3 * MIB - 1, []),
        (3 * MIB, [1]),
        (8_800_000, [2, 1]),
        (41_000_000, [8, 2, 1]),
        (400_000_000, [64, 16, 4]),
        (48 * 2**30, [16384, 4096, 1024]),
    ],
)
def test_sizes_cut_a_model_into_a_few_buckets_up_to_some_dozens(num_bytes, sizes):
    assert sizes_to_try(num_bytes) == [ONE_SUM, *(MIB * size for size in sizes)]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([[1.0, 0.9, 0.8]] * 3, 4),
        ([[1.0, 0.985, 1.2]] * 3, 0),  # gains too little
        ([[1.0, 1.1, 1.2]] * 3, 0),
        # everything becomes faster from round to round
        ([[4.0, 3.6, 4.4], [2.0, 1.8, 2.2], [1.0, 0.9, 1.1]], 8),
        # one disturbed block decides nothing
        ([[1.0, 0.9, 1.1], [1.0, 9.0, 1.1], [1.0, 0.9, 1.1]], 8),
        ([[9.0, 0.9, 1.1], [1.0, 1.1, 1.2], [1.0, 1.1, 1.2]], 0),
    ],
)
def test_the_fastest_size_is_that_of_the_median_round(seconds, chosen):
    assert fastest([0, 8, 4], typical_seconds(np.array(seconds))) == chosen
    assert fastest([8, 0, 4], np.ones(3)) == 8  # no gain


def test_the_reported_seconds_are_the_ones_that_decide():
    seconds = np.array([[4.0, 3.9], [2.0, 1.0], [1.0, 0.9]])
    np.testing.assert_allclose(typical_seconds(seconds), [2.0, 1.8])
