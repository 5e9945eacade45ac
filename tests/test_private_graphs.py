"""Private symbols of Keras's graphs, optimizers and losses; see `test_private_api`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het import keras_graphs_adapter as adapter
from keras_het import private_api


def two_layers(**options: Any) -> keras.Model:
    inputs = keras.Input([2], name="given")
    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    inner = keras.Sequential([keras.Input([2]), *layers[:2]])
    model = keras.Model(inputs, {"out": layers[2](inner(inputs))})
    model.compile(**{"optimizer": "adam", "loss": {"out": "mse"}, **options})
    return model


def test_a_graph_of_layers_is_repeated(logical_devices: Any) -> None:
    model = two_layers()
    assert adapter.graph_of(model) is model and adapter.graph_of(model.layers[2]) is None
    inner = adapter.graph_of(model.layers[1])
    assert inner is model.layers[1]._functional
    nodes = adapter.nodes_of(model)
    assert [node.operation for node in nodes] == model.layers and nodes[0].is_input
    (last,) = nodes[2].outputs
    assert last is model.outputs[0] and nodes[2].input_tensors == nodes[1].outputs
    value = np.ones([3, 2], "float32")
    (found,) = adapter.call_node(
        nodes[2], nodes[2].operation, {id(nodes[1].outputs[0]): tf.constant(value)}, False
    )
    np.testing.assert_allclose(found, model.layers[2](value), rtol=1e-6)
    (given,) = adapter.flat_inputs(model, {"given": value.astype("float64")})
    assert given.dtype == model.layers[2].compute_dtype
    assert adapter.packed_outputs(model, [1])["out"] == 1
    assert adapter.seeds_of(model) == [model.layers[1].layers[1].seed_generator.state]


def test_what_a_compiled_model_keeps(logical_devices: Any) -> None:
    model = two_layers()
    tracker = adapter.loss_tracker(model)
    assert tracker is model.metrics[0] and tracker.name == "loss"
    assert adapter.losses_of(model) == []
    model.fit(np.ones([2, 2]), {"out": np.ones([2, 1])}, verbose=0)
    (loss,) = adapter.losses_of(model)
    assert loss.fn is keras.losses.mean_squared_error and private_api.is_of_keras(loss)
    compiled = adapter.compiled_loss(model)
    assert compiled is not None
    assert float(compiled({"out": tf.ones([2, 1])}, {"out": tf.zeros([2, 1])}, None)) == 1
    model.compile("sgd")
    assert adapter.loss_tracker(model) is not tracker
    assert adapter.own_step_of(model) is None


@pytest.mark.parametrize("name", ["adam", "adafactor", "ftrl", "lion", "nadam"])
def test_slots_of_an_optimizer(logical_devices: Any, name: str) -> None:
    """Two weights of the same path; all but the scalars belong to one of them."""
    weights = [keras.Variable(np.full([2, 3], i, "float32"), name="same") for i in range(2)]
    optimizer = keras.optimizers.get(name)
    optimizer.use_ema = True
    optimizer.build(weights)
    pairs = adapter.variables_of_optimizer(optimizer)
    assert [weight for weight, _ in pairs] == weights or pairs[0][0] is weights[0]
    kept = [variable for _, slots in pairs for variable in slots]
    assert len({id(variable) for variable in kept}) == len(kept)
    assert len(pairs[0][1]) == len(pairs[1][1]) > 1
    left = [v for v in optimizer.variables if all(v is not each for each in kept)]
    assert all(variable.shape == () for variable in left)
    private_api.recreate_variable(weights[0])
    adapter.know_variables_again(optimizer)
    optimizer.apply([tf.ones([2, 3])], [weights[0]])


def test_what_an_optimizer_does_without_gradients(logical_devices: Any) -> None:
    plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    weight = keras.Variable([1.0])
    plain.build([weight])
    adapter.count_step(plain, True)
    assert int(plain._iterations) == 1
    waiting = adapter.accumulated_gradients(plain, weight)
    assert waiting is not None and waiting.shape == (1,)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    scaled.build([weight])
    assert adapter.accumulated_gradients(scaled, weight) is None
    for is_finite, scale, steps in ((True, 8.0, 1), (False, 4.0, 1), (True, 4.0, 2)):
        adapter.count_step(scaled, tf.constant(is_finite))
        assert float(scaled.dynamic_scale) == scale
        assert int(scaled.inner_optimizer._iterations) == steps


def test_clipping_is_replaced_for_a_while(logical_devices: Any) -> None:
    optimizer, weight = keras.optimizers.SGD(1.0, clipvalue=0.1), keras.Variable([1.0])
    optimizer.build([weight])
    with adapter.clipping_by(optimizer, lambda gradients: [g / 2 for g in gradients]):
        optimizer.apply([tf.ones([1])], [weight])
    assert float(weight[0]) == 0.5
    optimizer.apply([tf.ones([1])], [weight])
    np.testing.assert_allclose(weight, [0.4], rtol=1e-6)


def test_memory_of_a_cpu_is_not_limited(logical_devices: Any) -> None:
    assert adapter.memory_limit("CPU:0") == float("inf")
    assert all(hasattr(found, "memory_limit") for found in adapter.device_lib.list_local_devices())


def test_the_function_around_a_graph_is_found():
    found = []

    @tf.function
    def traced(condition):
        own = tf.compat.v1.get_default_graph()
        tf.cond(condition, lambda: found.append(function_around() is own), lambda: None)
        found.append(function_around() is own)

    def function_around():
        return private_api.function_being_traced(tf.compat.v1.get_default_graph())

    traced(tf.constant(True))
    assert found == [True, True]

    class InfersItsShape(keras.layers.Layer):
        def call(self, values):
            found.append(function_around())
            return values

    InfersItsShape()(keras.Input(batch_shape=(1,)))
    assert found == [True, True, None]
    assert function_around() is None


def test_a_function_is_converted_as_its_caller():
    def sign(x):
        return 1 if x > 0 else -1

    converted = tf.function(lambda x: private_api.convert_as_called(sign)(x))
    assert converted(tf.constant(2.0)) == 1
    plain = tf.function(lambda x: private_api.convert_as_called(sign)(x), autograph=False)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        plain(tf.constant(2.0))


def test_an_operation_is_made_again_on_other_inputs():
    @tf.function
    def difference(x):
        first = tf.math.subtract(x, 1.0)
        second = private_api.repeat_operation(first.op, [x + 10.0, first.op.inputs[1]])
        orders = [private_api.order_of_operation(each.op) for each in (first, second)]
        assert orders[0] < orders[1]
        assert not private_api.is_stateful(first.op)
        assert not private_api.calls_functions(first.op)
        branch = tf.cond(x > 0, lambda: x, lambda: -x)
        while branch.op.type == "Identity":
            branch = branch.op.inputs[0]
        assert private_api.calls_functions(branch.op)
        return second

    assert difference(tf.constant(1.0)) == 10.0
