"""The private symbols this package relies on exist and mean what it takes them to mean."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters
from pipelines import ALL
from workers import adapted

from keras_het.loader import GlobalOrderDataset
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.planning import ReplicaLayout

NODES = {
    "_MapDataset": lambda d: d.map(lambda i: i),
    "_ParallelMapDataset": lambda d: d.map(lambda i: i, num_parallel_calls=2),
    "_BatchDataset": lambda d: d.batch(3),
    "_ParallelBatchDataset": lambda d: d.batch(3, num_parallel_calls=2),
    "_PrefetchDataset": lambda d: d.prefetch(3),
    "_RepeatDataset": lambda d: d.repeat(2),
    "_TakeDataset": lambda d: d.take(2),
    "_SkipDataset": lambda d: d.skip(2),
    "_ShardDataset": lambda d: d.shard(2, 1),
    "_OptionsDataset": lambda d: d.with_options(tf.data.Options()),
    "_ShuffleDataset": lambda d: d.shuffle(4, seed=3),
    "_AssertCardinalityDataset": lambda d: d.apply(tf.data.experimental.assert_cardinality(10)),
}


@pytest.mark.quick(
    "11-_ParallelMapDataset",
    "None-_BatchDataset",
    "None-_PrefetchDataset",
    "None-_TakeDataset",
    "None-_ShuffleDataset",
    "11-_ShuffleDataset",
)
@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("global_seed", [None, 11])
def test_a_rebuilt_node_gives_the_same_elements_over_several_epochs(name, global_seed):
    if global_seed is not None:
        tf.random.set_seed(global_seed)
    node = NODES[name](tf.data.Dataset.range(10))
    assert type(node).__name__ == name
    tf.random.set_seed(99)  # the seeds of the node count, not what is set by now
    rebuilt = adapter.rebuild_on(node, tf.data.Dataset.range(10))
    assert rebuilt.element_spec == node.element_spec
    assert int(rebuilt.cardinality()) == int(node.cardinality())
    for _ in range(4):
        for found, expected in zip(rebuilt, node, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_shuffle_without_a_seed_keeps_the_seed_of_the_global_one():
    tf.random.set_seed(5)
    node = tf.data.Dataset.range(30).shuffle(30)
    rebuilt = adapter.rebuild_on(node, tf.data.Dataset.range(30))
    orders = [[int(i) for i in node] for _ in range(3)]
    assert orders[0] != orders[1]
    assert [[int(i) for i in rebuilt] for _ in range(3)] == orders


@pytest.mark.parametrize("reshuffle", [True, False])
@pytest.mark.parametrize("shape", ["below repeat", "above repeat"])
def test_rebuilt_shuffles_under_and_over_repeat(shape, reshuffle):
    def chain(source):
        if shape == "above repeat":
            return source.repeat(2).shuffle(7, seed=1, reshuffle_each_iteration=reshuffle)
        return source.shuffle(7, seed=1, reshuffle_each_iteration=reshuffle).repeat(2)

    node = chain(tf.data.Dataset.range(9))
    inner = adapter.inputs_of(node)[0]
    source = adapter.rebuild_on(inner, tf.data.Dataset.range(9))
    rebuilt = adapter.rebuild_on(node, source)
    for _ in range(3):
        assert [int(i) for i in rebuilt] == [int(i) for i in node]


def test_other_nodes_are_not_rebuilt():
    node = tf.data.Dataset.range(4).filter(lambda i: i > 1)
    with pytest.raises(TypeError, match="_FilterDataset"):
        adapter.rebuild_on(node, tf.data.Dataset.range(4))


def test_an_applied_map_is_not_traced_again_and_keeps_its_captures():
    traces = []
    offset = tf.Variable(5, dtype=tf.int64)

    def function(index):
        traces.append(index)
        return index + offset

    node = tf.data.Dataset.range(4).map(function, num_parallel_calls=tf.data.AUTOTUNE)
    applied = adapter.AppliedMap(node, tf.data.Dataset.range(3))
    again = adapter.AppliedMap(applied, tf.data.Dataset.range(2))
    offset.assign(7)
    assert [int(i) for i in applied] == [7, 8, 9]
    assert [int(i) for i in again] == [7, 8]
    assert len(traces) == 1
    assert adapter.parallel_calls(applied) == adapter.parallel_calls(node) >= 1


def test_operations_in_functions_are_found_in_called_functions_too():
    random = tf.function(lambda i: tf.cast(i, tf.float32) * tf.random.uniform([]))
    node = tf.data.Dataset.range(4).map(lambda i: tf.cond(i > 1, lambda: random(i), lambda: 0.0))
    assert adapter.operations_in_functions(node) & adapter.RANDOM_VALUE_OPERATIONS
    plain = tf.data.Dataset.range(4).map(lambda i: i)
    assert not adapter.operations_in_functions(plain) & adapter.RANDOM_VALUE_OPERATIONS


def test_generators_are_recognised():
    top = ALL["generator"]()
    assert any(adapter.draws_from_generator(node) for node in adapter.upstream_of(top))
    flat = tf.data.Dataset.range(3).flat_map(tf.data.Dataset.range)
    assert not any(adapter.draws_from_generator(node) for node in adapter.upstream_of(flat))


def flat_rows(times, number):
    def draw(count):
        yield from range(count)

    return tf.data.Dataset.from_generator(
        draw, args=(times * number,), output_signature=tf.TensorSpec([], tf.int64)
    )


class Rows:
    def __call__(self, number):
        return flat_rows(2, number)


@pytest.mark.parametrize("make", [functools.partial(flat_rows, 2), Rows()])
def test_a_callable_that_makes_generators_is_not_for_fit(make):
    given = tf.data.Dataset.range(3).flat_map(make)
    assert adapter.draws_from_generator(given)
    assert not adapter.is_keras_generator(given)


def test_a_generator_of_fit_is_distinguished_from_others():
    batches = ((np.zeros([2, 3]), np.zeros([2])) for _ in range(4))
    given = adapted(batches)
    assert any(adapter.is_keras_generator(node) for node in adapter.upstream_of(given))
    assert not any(adapter.is_keras_py_dataset(node) for node in adapter.upstream_of(given))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.zeros([2, 3]), np.zeros([2])

    for other in (ALL["generator"](), adapted(Batches())):
        assert any(adapter.draws_from_generator(node) for node in adapter.upstream_of(other))
        assert not any(adapter.is_keras_generator(node) for node in adapter.upstream_of(other))
    assert any(adapter.is_keras_py_dataset(node) for node in adapter.upstream_of(other))


def test_what_counts_its_iterators():
    for again in (True, False):
        drawn = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=again)
        shuffled = tf.data.Dataset.range(9).shuffle(9, seed=1, reshuffle_each_iteration=again)
        for node in (drawn, shuffled):
            assert adapter.counts_iterators(node) == again
            found = adapter.first_reshuffled(node.map(lambda value: value).batch(2))
            assert found is (node if again else None)


def test_keras_functions_are_recognised_and_others_are_not():
    arrays = adapted(np.zeros([4, 2]), np.zeros([4]))
    assert any(adapter.keras_array_indices(node) for node in adapter.upstream_of(arrays))
    (found,) = filter(None, map(adapter.keras_arrays, adapter.upstream_of(arrays)))
    assert found.batch_size == 32 and not found.is_shuffled
    assert [tuple(array.shape) for array in found.arrays] == [(4, 2), (4,)]
    batches = tf.data.Dataset.from_tensors((np.zeros([4, 2]), np.zeros([4])))
    weighted = adapted(batches, class_weight={0: 1.0})
    assert any(adapter.keras_class_weight(node) for node in adapter.upstream_of(weighted))
    for node in adapter.upstream_of(batches.map(lambda x, y: (x, y))):
        assert not adapter.keras_array_indices(node)
        assert not adapter.keras_class_weight(node)


def test_keras_takes_our_base_class_for_a_distributed_dataset():
    assert issubclass(DistributedSteps, tf.distribute.DistributedDataset)
    steps = GlobalOrderDataset(
        tf.data.Dataset.range(4).batch(2), ReplicaLayout((1,), 0), lambda: [1], lambda b, s: b[0]
    )
    assert isinstance(steps, DistributedSteps)
    assert data_adapters.is_tf_dataset(steps)
    assert data_adapters.get_data_adapter(steps).num_batches == 2
