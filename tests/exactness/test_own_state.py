"""State that layers of somebody's own assign in a step: counters, sums, maxima, averages."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    ALL_SHARES,
    Trial,
    arrays,
    assert_all_close,
    assert_equivalent,
    dense_model,
    said,
    three_replicas,
    whole_and_in_parts,
)

ops = keras.ops


class State(keras.layers.Layer):
    """Makes the state that it is asked for; subclasses say in `update` what becomes of it."""

    def shapes(self):
        return {}

    def __init__(self, aggregation="none", **options):
        super().__init__(**options)
        for name, (kind, *shape) in self.shapes().items():
            made = self.add_weight(
                tuple(shape), "zeros", kind, trainable=False, aggregation=aggregation, name=name
            )
            setattr(self, name, made)

    def call(self, inputs, training=False):
        if training:
            self.update(inputs)
        return inputs


class Counters(State):
    def shapes(self):
        return {
            "steps": ("int32",),
            "float_steps": ("float32",),
            "rows": ("int64",),
            "float_rows": ("float32",),
            "elements": ("int32",),
            "positive": ("uint32",),
            "histogram": ("int32", 4),
            "chosen": ("float32",),
            "is_used": ("bool",),
        }

    def call(self, inputs, training=False):
        super().call(inputs, training=training)
        return inputs * (1 + 0.01 * ops.cast(self.steps, "float32"))

    def update(self, x):
        self.steps.assign_add(1)
        self.float_steps.assign(self.float_steps + 1.0)
        self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
        self.float_rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        self.elements.assign_add(ops.size(x))
        self.positive.assign_add(ops.sum(ops.cast(x > 0, "uint32")))
        places = ops.clip(ops.cast(x[:, 0] * 2 + 2, "int32"), 0, 3)
        self.histogram.assign_add(ops.cast(ops.sum(ops.one_hot(places, 4), axis=0), "int32"))
        self.chosen.assign_add(tf.reduce_sum(tf.boolean_mask(x, x > 0)))
        self.is_used.assign(True)


class Sums(State):
    def shapes(self):
        return {
            "total": ("float32", 5),
            "twice": ("float32",),
            "latest": ("float32", 5),
            "products": ("float32", 5, 5),
        }

    def update(self, x):
        self.total.assign(self.total + ops.sum(x, axis=0))
        self.twice.assign_add(ops.sum(x))
        self.twice.assign_add(2.0 * ops.sum(ops.square(x)))
        self.latest.assign(ops.sum(x, axis=0) - ops.sum(ops.abs(x), axis=0))
        rows = ops.cast(ops.shape(x)[0], "float32")
        self.products.assign(0.5 * self.products + ops.matmul(ops.transpose(x), x) / rows)


class Extremes(State):
    def shapes(self):
        return {
            "largest": ("float32",),
            "smallest": ("float32", 5),
            "largest_integer": ("int32",),
            "span": ("float32", 5),
        }

    def update(self, x):
        self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        self.smallest.assign(ops.minimum(self.smallest, ops.min(x, axis=0)))
        self.largest_integer.assign(
            ops.maximum(self.largest_integer, ops.max(ops.cast(100.0 * x, "int32")))
        )
        self.span.assign(ops.max(x, axis=0) - ops.min(x, axis=0))


class Averages(State):
    def shapes(self):
        return {
            "moving": ("float32", 5),
            "root": ("float32",),
            "running": ("float32",),
            "weight": ("float32",),
            "ratio": ("float32",),
            "hidden": ("float32", 3),
        }

    def __init__(self, **options):
        super().__init__(**options)
        self.network = keras.layers.Dense(3, "tanh")

    def build(self, shape):
        self.network.build(shape)

    def update(self, x):
        self.moving.assign(0.9 * self.moving + 0.1 * ops.mean(x, axis=0))
        self.root.assign(ops.sqrt(ops.mean(ops.square(x))))
        used = ops.cast(x > 0, "float32")
        total, weight = ops.sum(x * used), ops.sum(used)
        self.weight.assign_add(weight)
        self.running.assign(self.running + (total / weight - self.running) / self.weight)
        self.ratio.assign(total / ops.sum(ops.square(x)))
        self.hidden.assign(ops.mean(self.network(x), axis=0))


LAYERS = {each.__name__: each for each in (Counters, Sums, Extremes, Averages)}


def with_state(layer, **options):
    def hidden():
        return [keras.layers.Dense(5, "tanh"), layer(name="own"), keras.layers.Dense(4)]

    return dense_model(layers=hidden, **options)


@pytest.mark.quick("Counters-whole")
@whole_and_in_parts
@pytest.mark.parametrize("name", LAYERS)
def test_state_is_that_of_one_device(name, replicas, caplog):
    trial = Trial(lambda: with_state(LAYERS[name]), evaluate=False, predict=False)
    assert_equivalent(trial, ALL_SHARES, strategy=replicas())
    assert not said(caplog)


class Always(State):
    """Counts in predictions too."""

    def shapes(self):
        return {"rows": ("int32",), "total": ("float32", 5)}

    def call(self, inputs):
        self.rows.assign_add(ops.shape(inputs)[0])
        self.total.assign_add(ops.sum(inputs, axis=0))
        return inputs


@pytest.mark.full
def test_predictions_change_state_as_on_one_device():
    strategy = three_replicas()
    models = []
    for scope in (contextlib.nullcontext, strategy.scope):
        keras.utils.set_random_seed(3)
        with scope():
            models.append(with_state(Always))
        for shares in ((4, 2, 1), (0, 3, 0)):
            strategy.set_share_weights(shares)
            models[-1].predict(arrays(11)[0], batch_size=7, verbose=0)
    single, replicated = ([np.array(v) for v in m.get_layer("own").weights] for m in models)
    assert replicated[0] == 22
    assert_all_close(replicated, single, rtol=1e-5)


class Branched(State):
    """Assigns within a branch: the graph of the step does not have what."""

    def shapes(self):
        return {"rows": ("int32",), "largest": ("float32",)}

    def update(self, x):
        def assign():
            self.rows.assign_add(ops.shape(x)[0])
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
            return 0

        tf.cond(ops.sum(x) < 1e9, assign, lambda: 0)


@pytest.mark.quick("False")
@pytest.mark.parametrize("eagerly", [False, True])
def test_what_cannot_be_read_off_is_named(eagerly, caplog):
    with three_replicas().scope():
        model = with_state(Branched, run_eagerly=eagerly)
    model.fit(*arrays(8), batch_size=4, verbose=0, epochs=2)
    (message,) = said(caplog)
    for part in ("'own/rows'", "'own/largest'", "aggregation="):
        assert part in message


class Centred(State):
    """Each row depends on the others of its replica."""

    def shapes(self):
        return {"spread": ("float32",)}

    def update(self, x):
        self.spread.assign(ops.sum(ops.square(x - ops.mean(x, axis=0))))


@pytest.mark.full
def test_a_sum_of_rows_that_depend_on_each_other_is_named(caplog):
    with three_replicas().scope():
        model = with_state(Centred)
    model.fit(*arrays(8), batch_size=4, verbose=0)
    (message,) = said(caplog)
    assert "'own/spread': the mean over samples" in message


class Declared(State):
    def shapes(self):
        return {"value": ("float32",)}

    def update(self, x):
        what = {"sum": ops.sum(x), "mean": ops.mean(x), "only_first_replica": 1.0}
        self.value.assign_add(what[self.value.aggregation])


@pytest.mark.quick("False-sum")
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("eagerly", [False, True])
def test_state_that_says_what_it_is(eagerly, aggregation, caplog):
    layer = functools.partial(Declared, aggregation)
    trial = Trial(lambda: with_state(layer, run_eagerly=eagerly), evaluate=False, predict=False)
    assert_equivalent(trial, [(4, 2, 1), (0, 3, 5)])
    assert not said(caplog)


class Metric(keras.metrics.Metric):
    def __init__(self, update, aggregation="sum", **options):
        super().__init__(name="own", **options)
        self.kept = self.add_variable((), "zeros", aggregation=aggregation, name="kept")
        self.update = update

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(self.update(self.kept, y_pred))

    def result(self):
        return self.kept + 0.0


UPDATES = {
    "maximum": (lambda kept, y: ops.maximum(kept, ops.max(y)), "sum", True),
    "latest": (lambda kept, y: ops.sum(y), "sum", True),
    "incremental": (lambda kept, y: kept + (ops.mean(y) - kept) * 0.5, "sum", True),
    "twice": (lambda kept, y: kept + kept + ops.sum(y), "sum", True),
    "both": (lambda kept, y: kept + ops.sum(y) + 1.0, "sum", True),
    "difference": (lambda kept, y: kept - ops.sum(y), "sum", False),
    "steps": (lambda kept, y: kept + 1.0, "sum", True),
    "total": (lambda kept, y: kept + ops.sum(y), "sum", False),
    "chosen": (lambda kept, y: kept + tf.reduce_sum(tf.boolean_mask(y, y > 0)), "sum", False),
    "steps_of_first": (lambda kept, y: kept + 1.0, "only_first_replica", False),
    "steps_of_all": (lambda kept, y: kept + 1.0, "mean", False),
    "moving": (lambda kept, y: 0.5 * kept + ops.mean(y), "mean", False),
}


@pytest.mark.quick("incremental")
@pytest.mark.parametrize("name", UPDATES)
def test_metrics_whose_state_is_no_sum_are_named(name, caplog):
    update, aggregation, is_wrong = UPDATES[name]

    def build():
        return dense_model(metrics=[Metric(update, aggregation)])

    if not is_wrong:
        assert_equivalent(Trial(build, predict=False), [(3, 0, 5), (1, 1, 1)])
        assert not said(caplog)
        return
    with three_replicas().scope():
        model = build()
    model.fit(*arrays(8), batch_size=4, verbose=0, epochs=2)
    (message,) = said(caplog)
    for part in ("'own' (Metric)", "'kept'", 'aggregation is "sum"', "add_variable"):
        assert part in message


class Welford(keras.metrics.Metric):
    """Count, mean and squared distances from it, brought up to date one after the other."""

    def __init__(self):
        super().__init__(name="welford")
        for name in ("count", "mean", "squares"):
            setattr(self, name, self.add_variable((), "zeros", name=name))

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.cast(ops.shape(y_pred)[0], "float32")
        self.count.assign_add(rows)
        distance = ops.mean(y_pred) - self.mean
        self.mean.assign_add(distance * rows / self.count)
        self.squares.assign_add(ops.sum(ops.square(y_pred - self.mean)))

    def result(self):
        return self.squares / self.count


@pytest.mark.full
def test_a_metric_whose_sums_depend_on_each_other_is_named(caplog):
    with three_replicas().scope():
        model = dense_model(metrics=[Welford()])
    model.evaluate(*arrays(8), batch_size=4, verbose=0)
    messages = said(caplog)
    assert len(messages) == 2
    for name, message in zip(("mean", "squares"), sorted(messages), strict=True):
        assert f"(Welford) assigns its state '{name}'" in message


ARGUMENTS_OF_METRICS = {
    "F1Score": {"average": "micro", "threshold": 0.5},
    "FBetaScore": {"average": "micro", "threshold": 0.5},
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 2},
    "MeanMetricWrapper": {"fn": lambda y, found: ops.abs(y - found)},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 2},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


@pytest.mark.full
def test_children_of_metrics_of_keras_say_nothing(caplog):
    """The classes are somebody's own, so that what they assign is looked at."""
    made = []
    for name, kind in vars(keras.metrics).items():
        if not isinstance(kind, type) or name in ("Metric", "Mean", "Sum"):
            continue
        child = type("Own" + name, (kind,), {"__module__": __name__})
        made.append(child(**ARGUMENTS_OF_METRICS.get(name, {}), name=f"m{len(made)}"))
    assert len(made) > 30
    with three_replicas().scope():
        layers = [keras.layers.Dense(2, "softmax")]
        model = keras.Sequential([keras.Input((5,)), *layers])
        metrics = [m for m in made if not type(m).__name__.startswith("OwnSparse")]
        model.compile("sgd", "mse", metrics=metrics)
    x, _ = arrays(8)
    y = np.eye(2, dtype="float32")[(x[:, 0] > 0).astype(int)]
    model.evaluate(x, y, batch_size=4, verbose=0)
    assert not said(caplog)


@pytest.mark.full
def test_steps_of_keras_itself_say_nothing(caplog):
    def build():
        normalization = keras.layers.BatchNormalization(synchronized=True, epsilon=0.1)
        hidden = [keras.layers.Dense(4), normalization, keras.layers.Dropout(0.1)]
        return dense_model(layers=lambda: hidden, metrics=["mae", keras.metrics.R2Score()])

    with three_replicas().scope():
        model = build()
    model.fit(*arrays(8), batch_size=4, verbose=0)
    assert not said(caplog)
    assert np.all(np.isfinite(model.get_weights()[0]))
