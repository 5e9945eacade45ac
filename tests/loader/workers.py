"""Several workers in one process: one dataset object for each, over equally built pipelines."""

import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout


class Schedule:
    """Share weights by step, the same for every worker that asks in the same order."""

    def __init__(self, weights_by_call):
        self._weights = weights_by_call
        self.calls = 0

    def __call__(self):
        weights = self._weights[min(self.calls, len(self._weights) - 1)]
        self.calls += 1
        return weights


class Unchanged:
    """How parts get to a device that lies beside them; with it, passes read ahead."""

    placed_ahead = 0

    def __call__(self, parts):
        return parts

    def ahead(self, parts):
        self.placed_ahead += 1
        return parts


class Wrap:
    """Makes elements of their batches and sizes."""

    def __init__(self, placement=None):
        self.placement = placement

    def __call__(self, batches, sizes):
        return batches, sizes


def make_workers(build, replicas_per_worker, weights_by_call, placement=None, **options):
    return [
        GlobalOrderDataset(
            build(),
            ReplicaLayout(replicas_per_worker, index),
            Schedule(weights_by_call),
            Wrap(placement),
            **options,
        )
        for index in range(len(replicas_per_worker))
    ]


def adapted(*arguments, **options):
    """The dataset that Keras makes of what `fit` is given."""
    return data_adapters.get_data_adapter(*arguments, **options).get_tf_dataset()


def plain(value):
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy().tolist()
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return value.numpy().tolist()


def leaf_rows(batch):
    leaves = [plain(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None]
    assert len({len(leaf) for leaf in leaves}) == 1
    return [repr(row) for row in zip(*leaves, strict=True)]


def collect(iterators, layout_counts, steps=None):
    """Runs all workers in step; rows of every global batch in global order, and all sizes."""
    batches, all_sizes = [], []
    while steps is None or len(batches) < steps:
        elements = []
        for iterator in iterators:
            try:
                elements.append(next(iterator))
            except StopIteration:
                elements.append(None)
        if elements[0] is None:
            assert all(element is None for element in elements), "workers end at different steps"
            break
        assert None not in elements, "workers end at different steps"
        batches.append(_one_step(elements, layout_counts))
        all_sizes.append(tuple(elements[0][1].tolist()))
    return batches, all_sizes


def _one_step(elements, layout_counts):
    rows, replica = [], 0
    sizes = elements[0][1]
    for (local, own_sizes), count in zip(elements, layout_counts, strict=True):
        assert own_sizes.dtype == np.int64
        np.testing.assert_array_equal(own_sizes, sizes)
        assert len(local) == count
        for batch in local:
            got = leaf_rows(batch)
            assert len(got) == sizes[replica]
            rows += got
            replica += 1
    return rows


def reference(dataset, global_batch_size=None):
    """Rows of every global batch as one process sees them."""
    if global_batch_size is not None:
        dataset = dataset.batch(global_batch_size)
    return [leaf_rows(batch) for batch in dataset]
