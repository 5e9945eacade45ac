"""Models with a train step of their own, in the styles of the Keras guides."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    SHARES,
    Trial,
    arrays,
    assert_equivalent,
    batches,
    in_parts,
    said,
    three_replicas,
)


class Base(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")
        self.head = keras.layers.Dense(1)

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 4))
        self.built = True

    def call(self, x, training=False):
        return self.head(self.hidden(x))


def adam():
    return keras.optimizers.Adam(0.05, global_clipnorm=0.3)


def sgd():
    return keras.optimizers.SGD(0.02)  # unlike Adam, it shows the size of a gradient


def compiled(make, optimizer=adam, **options):
    def build():
        model = make()
        model.build((None, 5))
        options.setdefault("metrics", ["mae"])
        model.compile(optimizer(), "mse", **options)
        return model

    return build


class GuideStep(Base):
    """compute_loss, optimizer.apply, then a loop over the metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class LowLevelStep(Base):
    """A raw mean, own trackers, a test step, apply_gradients."""

    def __init__(self):
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.ops.square(y - y_pred))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.mae_metric.update_state(y, y_pred)
        return {"mae": self.mae_metric.result(), "batch": keras.ops.mean(keras.ops.abs(y_pred))}


class DecoratedStep(LowLevelStep):
    """The steps are functions of TensorFlow, with a condition that AutoGraph has to convert."""

    test_step = tf.function(LowLevelStep.test_step)

    @tf.function
    def train_step(self, data):
        logs = super().train_step(data)
        if self.optimizer.iterations > 2:
            self.head.bias.assign_add([0.25])
        return logs


def without_its_name(step):
    def wrapper(self, data):
        return step(self, data)

    return wrapper


class RenamedStep(LowLevelStep):
    """The steps are wrapped by a decorator that does not copy their names."""

    train_step = without_its_name(LowLevelStep.train_step)
    test_step = without_its_name(LowLevelStep.test_step)


class DecoratedRenamedStep(LowLevelStep):
    """TensorFlow's decorator is around one that does not copy the name."""

    train_step = tf.function(without_its_name(LowLevelStep.train_step))
    test_step = tf.function(without_its_name(LowLevelStep.test_step))


class DecoratedInstance(LowLevelStep):
    """A model that decorates its steps when it is made."""

    def __init__(self):
        super().__init__()
        self.train_step = tf.function(self.train_step, autograph=False)
        self.test_step = tf.function(self.test_step)


class FunctionalLossStep(Base):
    """keras.losses.mean_squared_error per sample, a scaled loss, values without a tracker."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            per_sample = keras.losses.mean_squared_error(y, y_pred)
            loss = keras.ops.mean(per_sample)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss, "size": keras.ops.mean(keras.ops.abs(y_pred))}


class VectorLossStep(LowLevelStep):
    """The step of many guides: the gradient of a loss per sample is that of its sum."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class SynchronizedVectorStep(VectorLossStep):
    """The gradient flows through the statistics of all replicas."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.Sequential(
            [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(synchronized=True)]
        )


class AverageLossStep(Base):
    """What losses of samples add up to, as in a custom loop, for the global batch or a share."""

    def train_step(self, data, by_name=tf.nn.compute_average_loss):  # as a script imports it
        x, y = data
        per_sample = keras.losses.MeanSquaredError(reduction=None)
        with tf.GradientTape() as tape:
            errors = per_sample(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(errors)
            twice = by_name(2 * errors, global_batch_size=8)
            total = loss + twice
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss, "twice": twice}


class InputAndWeightsStep(LowLevelStep):
    """The gradient of each sample is taken together with that of the weights."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = keras.losses.mean_squared_error(y, self(x, training=True))
        of_input, *gradients = tape.gradient(loss, [x, *self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(keras.ops.sum(keras.ops.abs(of_input), axis=-1))
        self.mae_metric.update_state(y, self(x))
        return {metric.name: metric.result() for metric in self.metrics}


class ScaledVectorStep(Base):
    """The vector is scaled before its gradient is taken."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, y_pred)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": keras.ops.mean(loss)}


class SeveralTargetsStep(Base):
    """A vector of samples, a vector of means, and a scalar in one call; one more for the input."""

    loss_object = keras.losses.MeanAbsoluteError(reduction=None)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y_pred = self(x, training=True)
            slope = inner.gradient(y_pred, x)
            per_sample = keras.losses.mean_squared_error(y, y_pred)
            means = keras.ops.stack([keras.ops.mean(y_pred**2), keras.ops.mean(slope**2)])
            scalar = keras.ops.mean(self.loss_object(y, y_pred))
        gradients = tape.gradient([per_sample, means, scalar], self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": scalar, "slope": keras.ops.mean(slope**2)}


class VectorOwnLoss(Base):
    """compute_loss returns a loss per sample; the steps are those of Keras."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.losses.mean_squared_error(y, y_pred)


class LossObjectStep(Base):
    """A keras.losses.Loss object called in the step."""

    loss_object = keras.losses.Huber()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_object(y, y_pred) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class OwnLoss(Base):
    """compute_loss is where the model's loss comes from; the steps are those of Keras."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred) ** 3) + sum(self.losses)

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"twice": 2 * self(x, training=False)}


class DelegatingStep(Base):
    """Calls the step of Keras and adds to its logs."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "norm": keras.ops.norm(self.head.kernel)}


class VariablesInLogs(LowLevelStep):
    """The logs have variables of Keras among them."""

    def train_step(self, data):
        logs = super().train_step(data)
        rate, steps = self.optimizer.learning_rate, self.optimizer.iterations
        rows, total = self.mae_metric.count, self.loss_tracker.total
        return {**logs, "rate": rate, "steps": steps, "rows": rows, "total": total}


class LossOfEachValue(keras.losses.Loss):
    """More values than samples."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, y_true, y_pred):
        return keras.ops.reshape(keras.ops.square(y_true - y_pred) * [[1.0, 2.0]], [-1])


@pytest.mark.full
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loss_with_several_values_for_each_sample(run_eagerly):
    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(sgd(), LossOfEachValue(), run_eagerly=run_eagerly)
        return model

    assert_equivalent(Trial(build, evaluate=False, predict=False), [(4, 2, 1)])


class AnyLogs(Base):
    """Has no gradient and no metric: nothing else of the step is combined."""

    def train_step(self, data):
        x, _ = data
        return {
            "vector": x[:, 0],
            "matrix": tf.cast(x[:, :2], tf.float16),
            "columns": tf.reduce_mean(x[:, :3], axis=0),
            "integers": tf.cast(8 * x[:, 0], tf.int32),
            "rows": tf.shape(x)[0],
            "positive": tf.reduce_mean(x) > -9.0,
            "number": 3,
            "nested": {"text": "same", "none": None},
        }

    test_step = train_step


@pytest.mark.quick("False-unequal")
@pytest.mark.parametrize("shares", [(4, 0, 1), (3, 3, 2)], ids=["unequal", "alike"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_whatever_is_in_the_logs_covers_all_samples(run_eagerly, shares):
    strategy = three_replicas()
    strategy.set_share_weights(shares)
    with strategy.scope():
        model = compiled(AnyLogs, metrics=None, run_eagerly=run_eagerly)()
    x, y = arrays(8)
    fitted = model.fit(x, y, batch_size=8, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    sizes = {(4, 0, 1): (6, 0, 2), (3, 3, 2): (3, 3, 2)}[shares]
    expected = {
        "vector": x[:, 0].mean(),
        "matrix": x[:, :2].mean(axis=0),
        "columns": x[:, :3].mean(axis=0),
        "integers": np.trunc(8 * x[:, 0]).mean(),
        "rows": sum(size * size for size in sizes) / 8 if run_eagerly else 8,
        "positive": 1.0,
        "number": 3.0,
    }
    for name, value in expected.items():
        for found in (fitted[name][0], evaluated[name]):
            np.testing.assert_allclose(
                found, value, rtol=1e-6, atol=1e-3 if name == "matrix" else 0
            )
    assert evaluated["text"] == ("same" if run_eagerly else b"same")
    assert evaluated["none"] is None


class Gan(keras.Model):
    """Two optimizers and two losses a step; the noise comes with the data, so that it is equal."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((1,)), keras.layers.Dense(5)])
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self):
        super().compile()
        self.d_optimizer = keras.optimizers.Adam(0.05)
        self.g_optimizer = keras.optimizers.SGD(0.05, clipnorm=0.1)
        self.d_optimizer.build(self.discriminator.trainable_weights)
        self.g_optimizer.build(self.generator.trainable_weights)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, noise = data
        ones = tf.ones((tf.shape(real)[0], 1))
        both = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([ones, 0 * ones], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(0 * ones, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@pytest.mark.full
def test_gan_with_two_optimizers():
    def build():
        model = Gan()
        model.compile()
        return model

    assert_equivalent(Trial(build, evaluate=False, predict=False), ALL_SHARES)


class TwoApplies(Base):
    """One loss for two parts of the model, each with the scaled loss of its own optimizer."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.second = keras.optimizers.SGD(0.05)
        self.second.build(self.head.trainable_weights)
        self.first = keras.optimizers.Adam(0.05)
        self.first.build(self.hidden.trainable_weights)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
            scaled = self.first.scale_loss(loss)
        first, second = self.hidden.trainable_weights, self.head.trainable_weights
        gradients = tape.gradient(scaled, first), tape.gradient(loss, second)
        self.first.apply(gradients[0], first)
        self.second.apply(gradients[1], second)
        return {"loss": loss}


class DerivedLogs(LowLevelStep):
    """Numbers made of results, of losses and of samples."""

    def train_step(self, data):
        x, y = data
        y_pred = self(x, training=True)
        loss, numbers = self.compute_loss(y=y, y_pred=y_pred), keras.ops.cast(x > 0, x.dtype)
        logs = super().train_step(data)
        return {
            **logs,
            "perplexity": keras.ops.exp(logs["loss"]),
            "of_both": logs["mae"] / keras.ops.maximum(self.loss_tracker.result(), 0.1),
            "gap": self.loss_tracker.result() - loss,
            "likelihood": keras.ops.exp(-loss),
            "positive": keras.ops.sum(numbers * y) / keras.ops.sum(numbers),
            "samples": keras.ops.shape(x)[0],
            "largest": keras.ops.max(keras.ops.abs(y_pred)),
            "of_a_function": tf.function(keras.ops.mean, autograph=False)(y_pred),
        }

    def test_step(self, data):
        mae = super().test_step(data)["mae"]
        return {"mae": mae, "squared": mae**2}


NO_METRICS = {"metrics": None}
TRAINING = {"evaluate": False, "predict": False}
# The model, arguments of `compiled` and of the trial, and the shares.
STEPS = {
    "of the guide": (GuideStep, {}, {}, ALL_SHARES),
    "low level": (LowLevelStep, NO_METRICS, {}, ALL_SHARES),
    "decorated": (DecoratedStep, NO_METRICS, {}, ALL_SHARES),
    "decorated instance": (DecoratedInstance, NO_METRICS, {}, ALL_SHARES),
    "renamed": (RenamedStep, NO_METRICS, {}, ALL_SHARES),
    "decorated and renamed": (DecoratedRenamedStep, NO_METRICS, {}, ALL_SHARES),
    "that calls Keras's": (DelegatingStep, {}, {}, SHARES),
    "functional loss": (FunctionalLossStep, NO_METRICS, {"evaluate": False}, ALL_SHARES),
    "loss object": (LossObjectStep, NO_METRICS, {"evaluate": False}, SHARES),
    "own compute_loss": (OwnLoss, {}, {}, ALL_SHARES),
    "compute_loss of a vector": (VectorOwnLoss, {"optimizer": sgd}, {"predict": False}, SHARES),
    "variables in the logs": (VariablesInLogs, NO_METRICS, {}, ALL_SHARES),
    "derived logs": (DerivedLogs, NO_METRICS, {"evaluate": True}, ALL_SHARES),
    "two optimizers": (TwoApplies, NO_METRICS, {"evaluate": False}, ALL_SHARES),
    **{
        model.__name__: (model, {"optimizer": sgd, **NO_METRICS}, TRAINING, ALL_SHARES)
        for model in (
            VectorLossStep,
            ScaledVectorStep,
            SeveralTargetsStep,
            AverageLossStep,
            InputAndWeightsStep,
        )
    },
    "vector through synchronized statistics": (
        SynchronizedVectorStep,
        {"optimizer": sgd, **NO_METRICS},
        TRAINING,
        SHARES,
    ),
    "vector, eagerly": (
        VectorLossStep,
        {"optimizer": sgd, "run_eagerly": True, **NO_METRICS},
        TRAINING,
        [(4, 2, 1)],
    ),
}


@pytest.mark.quick("variables in the logs", "AverageLossStep", "derived logs")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_ones_own(name):
    model, options, compared, shares = STEPS[name]
    assert_equivalent(Trial(compiled(model, **options), **compared), shares)


# The others read after the update what it changes, or sum over replicas before it.
IN_PARTS = (
    *("of the guide", "low level", "functional loss", "loss object", "own compute_loss"),
    *("derived logs", "two optimizers", "VectorLossStep", "ScaledVectorStep"),
)


@pytest.mark.full
@pytest.mark.parametrize("name", IN_PARTS)
def test_a_step_of_ones_own_in_parts(name):
    model, options, compared, _ = STEPS[name]
    trial = Trial(compiled(model, **options), **compared)
    assert_equivalent(trial, strategy=in_parts())


class BranchesOnResult(GuideStep):
    """Numbers whose making the graph does not say, beside one of which it does."""

    def train_step(self, data):
        logs = super().train_step(data)
        loss = logs["loss"]
        return {
            **logs,
            "branch": tf.cond(loss > 0, lambda: 2 * loss, lambda: loss),
            "state": self.metrics[0].total / self.metrics[0].count,
            "samples_of_result": keras.ops.mean(data[1] / loss),
            "double": 2 * loss,
        }


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.full)])
def test_logs_that_cannot_be_computed_again_are_named(is_eager, caplog):
    with three_replicas().scope():
        model = compiled(BranchesOnResult, run_eagerly=is_eager)()
    model.fit(batches(), verbose=0)
    (remark,) = said(caplog)
    names = "'branch', " + is_eager * "'double', " + "'samples_of_result', 'state'"
    assert f"the graph does not show how: {names}." in remark
