"""Ways in which Keras executes steps: several at once, eagerly, compiled."""

import functools
import gc

import keras
import pytest
from devices import DEVICES
from equivalence import (
    Trial,
    assert_all_close,
    assert_equivalent,
    batches,
    dense_model,
    three_replicas,
)

from keras_het import HeterogeneousStrategy
from keras_het.strategy.exact.keras_step import check_can_compile


def unknown_cardinality():
    return batches(34).filter(lambda x, y: True)


@pytest.mark.quick("data0-3", "unknown_cardinality-2")
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("data", [functools.partial(batches, 34), unknown_cardinality])
def test_steps_per_execution(steps, data):
    # 34 samples are 5 steps: the last execution is shorter
    build = functools.partial(dense_model, steps_per_execution=steps, metrics=["mae"])
    assert_equivalent(Trial(build, data))


def test_run_eagerly():
    build = functools.partial(dense_model, run_eagerly=True, metrics=["mae"])
    assert_equivalent(Trial(build))


def test_steps_per_epoch_on_a_repeated_data_set():
    def fit(model, callbacks):
        return model.fit(
            batches().repeat(), epochs=2, steps_per_epoch=4, verbose=0, callbacks=callbacks
        )

    assert_equivalent(Trial(dense_model, fit=fit, evaluate=False, predict=False))


def test_jit_compile_of_one_replica():
    results = []
    for scope in (HeterogeneousStrategy(devices=DEVICES[:1]).scope, None):
        keras.utils.set_random_seed(7)
        if scope is None:
            model = dense_model(jit_compile=False)
        else:
            with scope():
                model = dense_model(jit_compile=True)
        history = model.fit(batches(16), epochs=2, verbose=0)
        results.append((history.history["loss"], *model.get_weights()))
    assert_all_close(*results)


def test_jit_compile_of_several_replicas_is_refused():
    with three_replicas().scope():
        model = dense_model(jit_compile=True)
    with pytest.raises(ValueError, match=r"(?s)XLA cannot compile.*Received.*jit_compile=True"):
        model.fit(three_replicas().distribute(batches()), verbose=0)


def test_jit_compile_of_one_gpu_with_a_summation_is_refused(monkeypatch):
    # its exchange is a call by the CPU, in the middle of the step
    strategy = HeterogeneousStrategy(devices=DEVICES[:1])
    with strategy.scope():
        model = dense_model(jit_compile=True)
    extended = strategy.extended
    monkeypatch.setattr(type(extended), "worker_devices", property(lambda self: ("GPU:0",)))
    check_can_compile(strategy, model)
    extended.use_summation(object())
    with pytest.raises(ValueError, match=r"(?s)XLA cannot.*Received.*'summation'.*all_reduce"):
        check_can_compile(strategy, model)
    with extended.reductions_within_worker():
        check_can_compile(strategy, model)


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
