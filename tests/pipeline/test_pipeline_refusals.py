"""What a pipeline cannot do is refused with what was received and what to do instead."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from pipeline_training import DEVICES, plan_of

import keras_het
from keras_het import callbacks

L = keras.layers
pytestmark = pytest.mark.usefixtures("logical_devices")


def compiled(model, **options):
    model.compile("sgd", "mse", **{"jit_compile": False, **options})
    return model


def sequential(*layers, **options):
    layers = layers or (L.Dense(3, name="one"), L.Dense(3, name="two"), L.Dense(1, name="three"))
    return compiled(keras.Sequential([keras.Input([4]), *layers]), **options)


def model_under(strategy, build=sequential):
    with strategy.scope():
        return build()


def fit(model, shape=(4,), **options):
    model.fit(np.ones([4, *shape]), np.ones([4, 1]), verbose=0, **options)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = L.Dense(1)

    def call(self, inputs):
        return self.layer(inputs)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options)


def subclassed(kind):
    return compiled(kind([keras.Input([4]), L.Dense(1)]))


def stateful():
    layers = [keras.Input(batch_shape=(4, 2, 3)), L.LSTM(3, stateful=True), L.Dense(1)]
    return compiled(keras.Sequential(layers))


MODELS = {
    "own call": (lambda: compiled(Own()), "Received: Own .*Python code. Build it with keras.Model"),
    "own train step": (lambda: subclassed(OwnStep), "would not run train_step. Received: OwnStep"),
    "own loss": (lambda: subclassed(OwnLoss), "would not run compute_loss. Received: OwnLoss"),
    "eager": (lambda: sequential(run_eagerly=True), "run_eagerly=True.. Leave that argument out"),
    "compiled": (lambda: sequential(jit_compile=True), "or set jit_compile=False"),
    "several steps": (lambda: sequential(steps_per_execution=2), "steps_per_execution=2"),
    "stateful": (stateful, "LSTM .* with stateful=True. Set stateful=False"),
    "synchronized": (
        lambda: sequential(L.BatchNormalization(synchronized=True), L.Dense(1)),
        "needs all micro-batches at once. Received: BatchNormalization .* Set it to False",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_cut(name):
    build, message = MODELS[name]
    model = model_under(keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES), build)
    with pytest.raises(ValueError, match=message):
        fit(model, (2, 3) if name == "stateful" else (4,))


def test_a_sequential_model_without_an_input_shape_is_built_by_fit():
    strategy = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:1])
    fit(model_under(strategy, lambda: compiled(keras.Sequential([L.Dense(1)]))))
    assert strategy.plan is not None


ARGUMENTS = {
    "a text": ({"split_after": "one"}, "split_after must be a list .* Received: 'one'"),
    "numbers": ({"split_after": [1]}, r"Received: \[1\]"),
    "no plan": ({"plan": ["one"]}, r"plan must be a .*PipelinePlan.*Received: plan=\['one'\]"),
    "no micro-batches": ({"num_micro_batches": 0}, "Received: num_micro_batches=0"),
    "schedule": ({"schedule": "2f2b"}, "Received: .*2f2b"),
    "recompute": ({"recompute": "sometimes"}, "Received: .*sometimes"),
    "device": ({"devices": ["CPU:9"]}, "Received: .*CPU:9"),
    "no bytes": (
        {"device_memory_bytes": 0},
        "device_memory_bytes must be a positive .* Received: 0",
    ),
    "bytes of one": ({"device_memory_bytes": [1e6]}, r"4 devices .* Received: \[1000000.0\]"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    options, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        keras_het.PipelineStrategy(**{"devices": DEVICES, **options})


ONE, TWO = (0, 0), (0, 1)
PLANS = {
    "unknown layer": (["four"], "Received: 'four', .* Choose among: one, two, three"),
    "a name that Keras makes up": (["dense_7"], "name the layers you cut after, as in Dense"),
    "last layer": (["three"], "Received: 'three', the model's last layer"),
    "order": (["two", "one"], r"Received: \['two', 'one'\]. Put them in the order"),
    "gap": (plan_of([0, 1, 2], [[0], [1]], [ONE, ONE]), "must have all 3 layer calls .* Received"),
    "devices": (plan_of([0, 1, 3], [[0], [4]], [ONE, ONE]), r"from 0 to 3. Received: \[4\]"),
    "twice": (plan_of([0, 1, 3], [[0], [1, 1]], [ONE, TWO]), r"Received: \[1, 1\]"),
    "no work": (plan_of([0, 1, 3], [[0], [1, 2]], [ONE, ONE]), r"Received: routes \[0, 0\]"),
    "routes": (
        dataclasses.replace(plan_of([0, 3], [[0]], [ONE]), num_micro_batches=3),
        "a replica for each of 3 micro-batches",
    ),
}


def test_a_strategy_says_what_it_is():
    strategy = keras_het.PipelineStrategy(["one"], 2, DEVICES)
    start = f"<PipelineStrategy: worker 0 of 1, devices [{', '.join(DEVICES)}] here, "
    assert repr(strategy) == f"{start}no plan before the first step>"
    fit(model_under(strategy))
    assert repr(strategy) == f"{start}2 stages>"


def planned(plan):
    given = {"split_after" if isinstance(plan, list) else "plan": plan}
    return keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES, **given)


@pytest.mark.parametrize("name", PLANS)
def test_plans(name):
    plan, message = PLANS[name]
    model = model_under(planned(plan))
    with pytest.raises(ValueError, match=message):
        fit(model)


@pytest.mark.parametrize("plan", [["first"], plan_of([0, 1, 3], [[0], [1]], [ONE, ONE])])
def test_a_cut_between_uses_of_one_weight(plan):
    strategy = planned(plan)
    with strategy.scope():
        inputs = keras.Input([4])
        again = L.Dense(4, name="again")
        middle = L.Dense(4, name="first")(again(inputs))
        model = compiled(keras.Model(inputs, again(middle)))
    with pytest.raises(ValueError, match=r"Received: a cut b.* Cut before"):
        fit(model)


def test_devices_without_enough_memory_are_named():
    strategy = keras_het.PipelineStrategy(["one"], 2, DEVICES[:2], device_memory_bytes=[1e9, 10.0])
    model = model_under(strategy)
    with pytest.raises(ValueError, match=rf"Received.*{DEVICES[1]}.* B"):
        fit(model)


OUTPUTS = {
    "matrix": (lambda h: keras.ops.matmul(h, keras.ops.transpose(h)), r"output of shape \[2, 2\]"),
    "scalar": (lambda h: {"rows": h, "mean": keras.ops.mean(h)}, r"output\['mean'\] of shape \[\]"),
    "tiled": (lambda h: [h, keras.ops.tile(h, (2, 1))], r"output\[1\] of shape \[4, 3\] for 2"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_without_a_row_for_each_sample(name):
    function, received = OUTPUTS[name]
    strategy = keras_het.PipelineStrategy(num_micro_batches=2, devices=DEVICES[:1])
    with strategy.scope():
        inputs = keras.Input([4])
        model = keras.Model(inputs, function(L.Dense(3)(inputs)))
    with pytest.raises(ValueError, match=f"joins the rows of all micro-batches.*{received}"):
        model.predict(np.ones([8, 4]), verbose=0)


def test_a_loop_of_the_users_own():
    def own(value):
        return value

    strategy = keras_het.PipelineStrategy(devices=DEVICES)
    with pytest.raises(ValueError, match=r"Received: strategy.run of own. Use model.fit"):
        strategy.run(own, args=(1.0,))


def test_async_workers(monkeypatch):
    addresses = [f"127.0.0.1:{port}" for port in (4001, 4002, 4003)]
    cluster = {"worker": addresses[:1], "async": addresses[1:2], "ps": addresses[2:]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match=r'Received: a cluster with 1 task.s. in the job "async"'):
        keras_het.PipelineStrategy(devices=DEVICES)


@pytest.mark.parametrize(
    "callback",
    [
        callbacks.BatchBalancer(),
        callbacks.LocalTraining("sync_easgd"),
        callbacks.AsyncWorkers(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_need_whole_models(callback):
    model = model_under(keras_het.PipelineStrategy(["one"], 2, DEVICES))
    name = type(callback).__name__
    with pytest.raises(ValueError, match=f"{name} does not work .* Received: {name} .* Leave it"):
        fit(model, callbacks=[callback])
