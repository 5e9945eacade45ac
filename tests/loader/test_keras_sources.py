"""Arrays and PyDatasets reach the loader through Keras's own adapters."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters
from workers import adapted, collect, make_workers, reference

import keras_het
from keras_het.loader import Knobs, tunable_pipeline

X = np.arange(46, dtype="float32").reshape(23, 2)
Y = np.arange(23) % 4


@pytest.mark.quick("23-True", "20-False")
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("samples", [20, 23])
def test_arrays(shuffle, samples):
    def build():
        tf.keras.utils.set_random_seed(5)
        return adapted(X[:samples], Y[:samples], batch_size=5, shuffle=shuffle)

    counts = (1, 2)
    workers = make_workers(build, counts, [[4, 2, 1], [0, 1, 3], [1, 0, 0], [1, 1, 1]])
    batches, sizes = collect([iter(worker) for worker in workers], counts)
    assert batches == reference(build())
    assert "own rows by their indices" in workers[0].reason
    assert len(set(sizes)) > 1
    assert workers[0].fingerprint == workers[1].fingerprint is not None


@pytest.mark.full
def test_arrays_with_weights_dictionaries_and_class_weight():
    for options in (
        {"x": {"a": X, "b": X[:, :1]}, "y": Y, "sample_weight": np.ones(23)},
        {"x": X, "y": Y, "class_weight": {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.5}},
        {"x": X},
    ):

        def build(options=options):
            return adapted(**options, batch_size=6)

        workers = make_workers(build, (1, 1), [[1, 3], [0, 1]])
        assert collect([iter(worker) for worker in workers], (1, 1))[0] == reference(build())


@pytest.mark.skipif(
    hasattr(data_adapters.ArrayDataAdapter, "_tf_shuffle"),
    reason="Keras 3.16 orders arrays by the number of the epoch",
)
def test_unseeded_arrays_are_distinguished():
    tf.random.set_seed(None)
    workers = make_workers(lambda: adapted(X, Y, batch_size=5, shuffle=True), (1, 1), [[1, 1]])
    for worker in workers:
        next(iter(worker))
    assert workers[0].fingerprint != workers[1].fingerprint


@pytest.mark.full
@pytest.mark.parametrize("is_built", [True, False])
def test_class_weight_keeps_element_mode(is_built):
    def build(knobs):
        rows = tf.data.Dataset.range(23).map(lambda i: (tf.stack([i, i]), i % 3))
        return rows.batch(5).prefetch(knobs.prefetch)

    def weighted():
        data = tunable_pipeline(build) if is_built else build(Knobs(2, 2, 2))
        return adapted(data, class_weight={0: 1.0, 1: 2.0, 2: 7.0})

    workers = make_workers(weighted, (1, 1), [[1, 3], [1, 0]])
    assert workers[0].mode == "element"
    assert collect([iter(worker) for worker in workers], (1, 1))[0] == reference(weighted())


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(5 * index, 5 * index + 5)
        return X[rows], Y[rows]


@pytest.mark.quick("True")
@pytest.mark.parametrize("parallel", [False, True])
def test_py_dataset(parallel):
    sources = [Batches(**({"workers": 2} if parallel else {})) for _ in range(2)]
    adapters = [data_adapters.get_data_adapter(source) for source in sources]
    datasets = iter([adapter.get_tf_dataset() for adapter in adapters])
    workers = make_workers(lambda: next(datasets), (1, 1), [[1, 3], [1, 0]])
    for _ in range(2):
        for adapter in adapters:
            adapter.on_epoch_begin()
        batches, _ = collect([iter(worker) for worker in workers], (1, 1), steps=5)
        for adapter in adapters:
            adapter.on_epoch_end()
        assert batches == reference(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5))


@pytest.fixture
def looked_at():
    """A worker that has looked at the first of ten batches, and the weights of its replicas."""
    weights, is_ahead = [[1, 1]], threading.Event()

    def generate():
        for number in range(10):
            if number == 2:  # more than Keras keeps: the third is in a buffer
                is_ahead.set()
            yield X[2 * number : 2 * number + 2], Y[2 * number : 2 * number + 2]

    source = data_adapters.get_data_adapter(generate())
    (worker,) = make_workers(lambda: source.get_tf_dataset().prefetch(4), (2,), weights)
    next(iter(worker))
    assert is_ahead.wait(30)
    return worker, weights


def ten_batches():
    return reference(tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).batch(2))


def test_other_weights_lose_no_batch_of_a_generator(looked_at):
    worker, weights = looked_at
    weights[0] = [1, 0]
    worker.cut_again()
    batches, sizes = collect([iter(worker)], (2,))
    assert batches == ten_batches()
    assert set(sizes) == {(2, 0)}


@pytest.mark.parametrize(("passes", "step"), [(0, 0), (0, 1), (2, 4)])
def test_a_resume_loses_no_batch_of_a_generator(looked_at, passes, step):
    worker, weights = looked_at
    worker.start_at(passes, step)
    weights[0] = [1, 0]
    worker.cut_again()
    iterator = iter(worker)
    batches, sizes = collect([iterator], (2,), steps=3)
    assert batches == ten_batches()[step : step + 3]
    assert set(sizes) == {(2, 0)}
    assert iterator.step == step + 3
    assert worker.position == ((True,) * passes, step + 3)


def test_a_resume_beyond_the_end_of_a_generator_has_no_batch(looked_at):
    worker, _ = looked_at
    worker.start_at(0, 12)
    assert collect([iter(worker)], (2,))[0] == []


def test_a_generator_does_not_go_back(looked_at):
    worker, _ = looked_at
    worker.start_at(0, 4)
    with pytest.raises(ValueError, match=r"step=3, .* step 4\. Call fit with a new generator"):
        worker.start_at(0, 3)


@pytest.mark.quick("vectors")
@pytest.mark.parametrize("labels", [(64,), (64, 1)], ids=["numbers", "vectors"])
def test_a_forgotten_batch_is_named(labels):
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((64, 8)), np.zeros(labels)))
    with pytest.raises(
        ValueError, match=r"single samples, call .batch\(global_batch_size\) on the"
    ):
        model.fit(data, verbose=0)
    model.fit(data.batch(8), verbose=0)
