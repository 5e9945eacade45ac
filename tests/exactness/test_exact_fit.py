"""Ways to give `fit` its data and to execute its steps, and shares that change on the way."""

import contextlib
import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    SHARES,
    CountsTraces,
    Trial,
    arrays,
    assert_all_close,
    assert_equivalent,
    batches,
    dense_model,
    three_replicas,
)

import keras_het


def array_fit(model, callbacks, **options):
    x, y = arrays(30)
    return model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks, **options)


@pytest.mark.quick("validation_split")
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle": True},
        {"validation_split": 0.3},
        {"sample_weight": np.linspace(0.1, 2, 30).astype("float32")},
        {"validation_data": arrays(10, seed=3), "validation_batch_size": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arrays(options):
    fit = functools.partial(array_fit, **options)
    build = functools.partial(dense_model, metrics=["mae"])
    assert_equivalent(Trial(build, fit=fit, evaluate=False, predict=False))


@pytest.mark.full
def test_validation_dataset():
    options = {"validation_data": batches(13, seed=4), "validation_freq": 1}
    build = functools.partial(dense_model, metrics=["mae"])
    expected = assert_equivalent(Trial(build, options=options, predict=False))
    assert set(expected.history) == {"loss", "mae", "val_loss", "val_mae"}


class ChangeShares(keras.callbacks.Callback):
    """Other shares after every step: whatever they are, the numbers stay the same."""

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.shares = iter(ALL_SHARES * 4)

    def change(self):
        three_replicas().set_share_weights(next(self.shares))

    def on_train_batch_end(self, batch, logs=None):
        if self.when == "step":
            self.change()

    def on_epoch_end(self, epoch, logs=None):
        if self.when == "epoch":
            self.change()


@pytest.mark.quick("step")
@pytest.mark.parametrize("when", ["step", "epoch"])
def test_shares_that_change(when):
    def fit(model, callbacks):
        return model.fit(
            batches(46),
            epochs=3,
            verbose=0,
            callbacks=[*callbacks, ChangeShares(when)],
        )

    assert_equivalent(Trial(dense_model, fit=fit, evaluate=False, predict=False), [(4, 2, 1)])


class NoteTraces(ChangeShares):
    def __init__(self):
        super().__init__("step")
        self.traces = []

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.traces.append(CountsTraces.traces)


def test_other_shares_and_partial_batches_need_no_new_trace():
    with three_replicas().scope():
        model = dense_model(layers=lambda: [CountsTraces()])
    note = NoteTraces()
    model.fit(three_replicas().distribute(batches(46)), epochs=3, verbose=0, callbacks=[note])
    assert len(note.traces) == 18
    assert note.traces[0] > 0
    assert set(note.traces) == {note.traces[0]}


class Rows(keras.Model):
    """Notes how many rows each replica gets."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.built = True

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        data, *_ = tf.nest.flatten(data)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.numpy_function(self.note, [replica, tf.shape(data)[0]], tf.int32)
        return {"rows": tf.reduce_mean(data)}

    def note(self, replica, rows):
        self.seen.setdefault(int(replica), []).append(int(rows))
        return np.int32(0)


# A replica without samples computes on one row of zeros.
ROWS_OF_ALL_SHARES = [(3, 1, 5), (5, 2, 1), (8, 1, 1), (1, 8, 1), (3, 3, 2)]


def test_the_shares_of_these_tests_are_really_unequal():
    strategy = three_replicas()
    with strategy.scope():
        model = Rows()
        model.compile()
    for weights in ALL_SHARES:
        strategy.set_share_weights(weights)
        model.fit(tf.data.Dataset.from_tensors(tf.ones((8, 2))), verbose=0)
    seen = list(zip(*(model.seen[replica] for replica in range(3)), strict=True))
    assert seen == ROWS_OF_ALL_SHARES


def test_changed_shares_reach_the_replicas_within_the_epoch():
    strategy = three_replicas()
    strategy.set_share_weights((1, 0, 0))
    with strategy.scope():
        model = Rows()
        model.compile()
    change = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: strategy.set_share_weights((0, 0, 1))
    )
    model.fit(
        tf.data.Dataset.from_tensors(tf.ones((8, 2))).repeat(8), verbose=0, callbacks=[change]
    )
    assert model.seen[0][0] == 8
    assert [model.seen[replica][-1] for replica in range(3)] == [1, 1, 8]


@pytest.mark.quick("True")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_train_and_test_on_batch(run_eagerly):
    # a sum and a metric that counts show it if replicas compute on the same samples
    def fit(model, callbacks):
        (recorder,) = callbacks
        x, y = arrays(24)
        for step in range(4):
            rows = slice(6 * step, 6 * step + 6)
            logs = model.train_on_batch(x[rows], y[rows], return_dict=True)
            recorder.on_train_batch_end(step, logs)
            recorder.on_train_batch_end(step, model.test_on_batch(x, y, return_dict=True))

    def build():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        optimizer = functools.partial(keras.optimizers.SGD, 0.02)
        metrics = ["mae", keras.metrics.TruePositives(0.1, name="hits")]
        return dense_model(loss, optimizer, metrics=metrics, run_eagerly=run_eagerly)

    shares = [(3, 0, 5)] if run_eagerly else SHARES
    assert_equivalent(Trial(build, fit=fit, evaluate=False, predict=False), shares)


@pytest.mark.quick("False")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_predict_on_batch(run_eagerly):
    strategy = three_replicas()
    with strategy.scope():
        model = dense_model(run_eagerly=run_eagerly)
    single = dense_model()
    single.set_weights(model.get_weights())
    x, _ = arrays(5)
    for weights in SHARES:
        strategy.set_share_weights(weights)
        for part in (x, x[:1]):
            np.testing.assert_allclose(
                model.predict_on_batch(part), single.predict_on_batch(part), rtol=1e-5
            )


def test_a_plain_batch_is_cut_by_the_shares_of_the_moment():
    strategy = three_replicas()
    with strategy.scope():
        model = Rows()
        model.compile()
    x = np.ones((8, 2), "float32")
    for weights in ALL_SHARES:
        strategy.set_share_weights(weights)
        model.train_on_batch(x)
    seen = list(zip(*(model.seen[replica] for replica in range(3)), strict=True))
    assert seen == ROWS_OF_ALL_SHARES


def of_own_batches(strategy, rows=24):
    """Batches that the user's function makes for each replica."""

    def make(context):
        size = context.get_per_replica_batch_size(12)
        return tf.data.Dataset.from_tensor_slices(arrays(rows)).batch(size)

    return strategy.distribute_datasets_from_function(make)


def linear_model(strategy):
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_batches_of_replicas_under_equal_shares():
    strategy = three_replicas()
    strategy.set_share_weights([1, 1, 1])
    ours, one_device = linear_model(strategy), linear_model(None)
    ours.fit(of_own_batches(strategy), verbose=0)
    one_device.fit(*arrays(24), batch_size=12, shuffle=False, verbose=0)
    assert_all_close(ours.get_weights(), one_device.get_weights(), rtol=1e-5, atol=1e-6)


def test_batches_of_replicas_refuse_what_cannot_apply():
    strategy = three_replicas()
    strategy.set_share_weights([1, 1, 1])
    data = of_own_batches(strategy)
    model = linear_model(strategy)
    with pytest.raises(ValueError, match=r"(?s)BatchBalancer\..*strategy\.distribute\(dataset"):
        model.fit(data, verbose=0, callbacks=[keras_het.callbacks.BatchBalancer()])
    strategy.set_share_weights([3, 1, 1])
    with pytest.raises(ValueError, match=r"Received: shares \[3.*, 1.*, 1.*\]\. Give"):
        model.fit(data, verbose=0)
    with pytest.raises(ValueError, match="use equal shares"):
        next(iter(data))


@pytest.mark.full
def test_run_eagerly():
    build = functools.partial(dense_model, run_eagerly=True, metrics=["mae"])
    assert_equivalent(Trial(build))


@pytest.mark.full
def test_steps_per_epoch_on_a_repeated_dataset():
    def fit(model, callbacks):
        return model.fit(
            batches().repeat(), epochs=2, steps_per_epoch=4, verbose=0, callbacks=callbacks
        )

    assert_equivalent(Trial(dense_model, fit=fit, evaluate=False, predict=False))


@pytest.mark.full
def test_nothing_keeps_the_graphs_of_a_model():
    def train():
        with three_replicas().scope():
            model = dense_model(metrics=["mae"])
        model.fit(batches(34), epochs=1, validation_data=batches(34), verbose=0)
        model.predict(batches(34), verbose=0)

    def steps_kept():
        keras.backend.clear_session()
        gc.collect()
        found = (graph for graph in gc.get_objects() if type(graph).__name__ == "FuncGraph")
        return sum(graph.name.startswith("one_step") for graph in found)

    train()
    before = steps_kept()
    for _ in range(2):
        train()
    assert steps_kept() <= before
