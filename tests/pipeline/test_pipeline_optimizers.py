"""All that an optimizer may do besides a plain step, and all that may happen between fits."""

import functools

import keras
import numpy as np
import pytest
from pipeline_optimizers import EMBEDDED, OPTIMIZERS, perceptron, rows
from pipeline_training import DEVICES, assert_same, floatx, plan_of, train

import keras_het
from keras_het import callbacks
from keras_het.strategy.pipeline.model_units import ModelUnits

L = keras.layers
pytestmark = pytest.mark.usefixtures("double_precision", "logical_devices")


def plan_for(model):
    """Four stages, the last one without weights, one of them on two devices."""
    end = len(ModelUnits(model).units)
    bounds = [0, 2, end - 3, end - 1, end]
    one, two = (0,) * 3, (0, 1, 0)
    return plan_of(bounds, [[1], [0, 3], [2], [1]], [one, two, one, one])


def check(name, embeds=False, tolerance=1e-9):
    """Train with an optimizer on one device and in a pipeline; return what one device has."""
    build = functools.partial(perceptron, name, embeds)
    expected = train(build, rows(embeds))
    strategy = keras_het.PipelineStrategy(None, 3, DEVICES, plan=plan_for(expected.model))
    assert_same(train(build, rows(embeds), strategy), expected, tolerance)
    return expected


@pytest.mark.quick("decay")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_on_one_device(name):
    check(name)


@pytest.mark.full
def test_a_step_whose_gradients_overflow_is_skipped():
    with floatx("float32"):
        optimizer = check(None, tolerance=1e-4).model.optimizer
    assert 2 <= optimizer.inner_optimizer._iterations.numpy() <= 6, "of 8 steps"


@pytest.mark.full
@pytest.mark.parametrize("name", EMBEDDED)
def test_sparse_gradients_are_clipped_as_on_one_device(name):
    check(name, embeds=True)


@pytest.mark.full
def test_half_precision_skips_the_same_steps():
    with floatx("float32"):
        keras.config.set_dtype_policy("mixed_float16")
        optimizer = check("clipnorm", tolerance=5e-3).model.optimizer
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


class Life:
    """A model that has much done to it, in a pipeline or on one device."""

    def __init__(self, strategy, folder):
        self._strategy, self._folder = strategy, folder
        self.seen = []

    def see(self, model):
        self.seen += model.get_weights()
        self.seen += [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]

    def fit(self, model, **options):
        x, y, _ = rows()
        history = model.fit(x, y, batch_size=19, verbose=0, shuffle=False, **options).history
        self.seen += list(history.values())
        self.see(model)

    def live(self, long):
        x, y, _ = rows()
        keras.utils.set_random_seed(3)
        model = perceptron("clipnorm")
        self.seen.append(model.evaluate(x, y, batch_size=19, verbose=0))
        self.fit(model)
        # another optimizer, other layers trained, a loss over the whole batch
        model.layers[1].trainable = False
        model.compile(
            keras.optimizers.Adam(0.01, use_ema=True),
            lambda y, found: keras.ops.var(found - y),
            jit_compile=False,
        )
        self.fit(model, validation_data=(x, y))
        if not long:
            return
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
        self.fit(model)
        # a model that shares layers, cut elsewhere
        part = keras.Model(model.inputs, model.layers[5].output)
        part.compile("sgd", "mse", jit_compile=False)
        self.seen.append(part.predict(x, batch_size=19, verbose=0))
        part.fit(x, np.zeros([len(x), 5]), batch_size=19, verbose=0, shuffle=False)
        self.seen.append(part.predict(x, batch_size=19, verbose=0))
        self.fit(model)
        self.seen.append(model.train_on_batch(x[:7], y[:7]))
        self.seen.append(model.test_on_batch(x[:7], y[:7]))
        self.seen.append(model.predict_on_batch(x[:7]))
        self.see(model)
        path = self._folder / "model.keras"
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        self.fit(model)
        model.save(path)
        loaded = keras.models.load_model(path)
        assert loaded.optimizer.built
        self.fit(loaded)
        self.fit(model)


@pytest.mark.full
@pytest.mark.quick("short")
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_much_is_done_to_a_model(tmp_path, long):
    keras.backend.clear_session()
    alone = Life(None, tmp_path)
    alone.live(long)
    strategy = keras_het.PipelineStrategy(["dense", "dense_1"], 3, DEVICES)
    keras.backend.clear_session()
    together = Life(strategy, tmp_path)
    with strategy.scope():
        together.live(long)
    for found, expected in zip(together.seen, alone.seen, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def model_under(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), L.Dense(3, name="one"), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def fit(model, **options):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(24, 4)), random.normal(size=(24, 1))
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)


@pytest.fixture
def strategy(logical_devices):
    return keras_het.PipelineStrategy(["one"], 2, DEVICES)


@pytest.mark.full
def test_the_loader_is_tuned(strategy):
    fit(model_under(strategy), callbacks=[callbacks.LoaderTuner()])


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            raise InterruptedError


@pytest.mark.full
def test_training_continues_within_an_epoch(strategy, tmp_path):
    model = model_under(strategy)
    fit(model, epochs=2)
    backup = callbacks.BackupAndRestore(tmp_path, save_freq=3)
    with pytest.raises(InterruptedError):
        fit(model_under(strategy), epochs=2, callbacks=[backup, Stops()])
    other = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:2])
    resumed = model_under(other)
    fit(resumed, epochs=2, callbacks=[callbacks.BackupAndRestore(tmp_path, save_freq=3)])
    for one, two in zip(model.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)
