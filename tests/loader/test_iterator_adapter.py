"""Graphs of tf.data; the other symbols of the adapter are tested in test_private_api.py."""

import gc

import pytest
import tensorflow as tf

from keras_het.loader import iterator_adapter


@pytest.mark.full
def test_the_graphs_of_a_mapped_dataset_go_with_it():
    """Kinds of conditions included; those of a function that others use stay."""

    @tf.function
    def shared(number):
        return tf.cond(number > 2, lambda: number, lambda: -number)

    def mapped(number):
        return tf.cond(number > 1, lambda: shared(number), lambda: tf.zeros([], tf.int64))

    def graphs():
        return [each for each in gc.get_objects() if isinstance(each, iterator_adapter.FuncGraph)]

    shared(tf.constant(1, tf.int64))
    gc.collect()
    gc.disable()
    try:
        before = len(graphs())
        data_set = tf.data.Dataset.range(4).map(mapped)
        iterator_adapter.free_graph_with(data_set)
        batches = data_set.batch(4)
        iterator = iter(batches)
        assert len(graphs()) > before
        del data_set
        assert next(iterator).numpy().tolist() == [0, 0, -2, 3]
        del iterator, batches
        assert len(graphs()) <= before + 3  # of `shared`, traced for a symbolic number
        assert shared(tf.constant(3, tf.int64)) == 3
    finally:
        gc.enable()
