"""Sums among a process's GPUs by NCCL: the choice with fakes, the sums on CPUs' own collective.

A CPU's collective ignores the wish for NCCL; all else is as on GPUs.
"""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from equivalence import Trial, assert_equivalent, batches, build_seeded, dense_model

from keras_het import HeterogeneousStrategy, private_api
from keras_het.strategy import hierarchical_all_reduce
from keras_het.strategy.hierarchical_all_reduce import is_joined_by_nccl

SHARES = ((3, 0, 5), (5, 2, 1))
pytestmark = pytest.mark.usefixtures("double_precision")
Implementation = tf.distribute.experimental.CommunicationImplementation


@pytest.fixture
def summed(monkeypatch):
    """Types and numbers of values of each sum by NCCL in the graphs traced from now on."""
    found, original = [], private_api.sums_of_replicas

    def sums_of_replicas(collectives, values):
        found.append((values[0].values[0].dtype, len(values), len(collectives._launchers)))
        return original(collectives, values)

    monkeypatch.setattr(private_api, "sums_of_replicas", sums_of_replicas)
    joined = lambda devices, options: len(devices) > 1  # noqa: E731
    monkeypatch.setattr(hierarchical_all_reduce, "is_joined_by_nccl", joined)
    return found


def words():
    x = np.random.default_rng(1).integers(0, 9, (24, 3))
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True) * 0.1)).batch(8)


def embedding_model():
    layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 2)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return model


@pytest.mark.quick("dense")
@pytest.mark.parametrize(
    ("build", "data", "options"),
    [
        (dense_model, batches, {}),
        (dense_model, batches, {"micro_batch_size": 2}),
        (embedding_model, words, {}),
    ],
    ids=["dense", "micro-batches", "sparse"],
)
def test_fit_equals_one_device(summed, build, data, options):
    strategy = HeterogeneousStrategy(DEVICES[:3], **options)
    trial = Trial(build, data, predict=False, infer_always=True)
    assert_equivalent(trial, SHARES, 1e-9, 1e-11, strategy=strategy)
    assert {kind for kind, _, _ in summed} <= {tf.float32, tf.float64} and summed
    assert {members for _, _, members in summed} == {3}


@pytest.mark.full
def test_several_steps_in_one_call(summed):
    def weights(devices, steps):
        with HeterogeneousStrategy(DEVICES[:devices], share_weights=(5, 3)[:devices]).scope():
            model = build_seeded(dense_model)
        model.compile("sgd", "mse", steps_per_execution=steps, jit_compile=False)
        model.fit(batches(), epochs=2, verbose=0)
        return model.get_weights()

    expected = weights(1, 1)
    assert not summed  # one device sums nothing
    for one, other in zip(weights(2, 3), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
    assert summed


@pytest.mark.parametrize("operation", ["SUM", "MEAN"])
def test_values_of_each_type_reach_all_devices(summed, operation):
    strategy = HeterogeneousStrategy(DEVICES[:3])
    reduce_op = getattr(tf.distribute.ReduceOp, operation)
    types_ = (tf.float64, tf.float32, tf.int64, tf.float32)

    def step():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group + 1
        own = [tf.cast(number, each) * tf.ones([2], each) for each in types_]
        return context.all_reduce(reduce_op, own)

    found = strategy.run(tf.function(step))
    expected = 6 if operation == "SUM" else 2
    for value in found:
        for each in strategy.experimental_local_results(value):
            np.testing.assert_array_equal(each, [expected] * 2)
    assert summed == [(tf.float64, 1, 3), (tf.float32, 2, 3)]


def test_eager_sums_copy_to_the_first_device(summed):
    strategy = HeterogeneousStrategy(DEVICES[:3])
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )
    assert float(strategy.reduce("SUM", values, axis=None)) == 3.0
    assert not summed


def gpus(monkeypatch, products, visible=None, logical=None, is_cuda_build=True):
    devices = [types.SimpleNamespace(name=f"physical:{n}") for n in range(len(products))]
    named = dict(zip([each.name for each in devices], products, strict=True))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
    logical = len(products) if logical is None else logical
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [None] * logical)
    details = lambda device: {"device_name": named[device.name]}  # noqa: E731
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    info = {"is_cuda_build": is_cuda_build}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: info)


TWO = ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/replica:0/task:1/device:GPU:1")


@pytest.mark.parametrize(
    ("products", "options", "expected"),
    [
        (("A100", "A100"), {}, True),
        (("A100", "A100", "T4"), {}, True),  # the third is not used
        (("A100", "T4"), {}, "as tried"),
        (("A100", "A100"), {"logical": 4}, False),
        (("A100", "A100"), {"is_cuda_build": False}, False),
    ],
    ids=["alike", "unlike-beside", "unlike", "parts", "no-cuda"],
)
def test_nccl_is_for_whole_gpus(monkeypatch, products, options, expected):
    gpus(monkeypatch, products, **options)
    monkeypatch.setattr(hierarchical_all_reduce.nccl, "joins", lambda devices: "as tried")
    options = private_api.CommunicationOptions
    assert is_joined_by_nccl(TWO, options()) is expected
    # who asks for it needs no trial
    assert is_joined_by_nccl(TWO, options(implementation=Implementation.NCCL)) is bool(expected)
    assert not is_joined_by_nccl(TWO, options(implementation=Implementation.RING))
    assert not is_joined_by_nccl(TWO[:1], options())
    assert not is_joined_by_nccl((TWO[0], "/device:CPU:0"), options())


def test_cpus_need_no_nccl():
    assert not is_joined_by_nccl(DEVICES[:2], private_api.CommunicationOptions())
