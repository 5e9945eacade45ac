"""A pipeline reads what was ordered, and nothing more when it is let go."""

import numpy as np
import pytest
import tensorflow as tf

from keras_het.loader.order.share_queue import ShareQueue

PASSES = 40


def batches() -> tf.data.Dataset:
    """Of which each iterator has the next order, and those that read on use up more."""
    return tf.data.Dataset.range(8).shuffle(8, seed=3).repeat().batch(4)


def pipeline(orders: ShareQueue) -> tf.data.Dataset:
    def cut(batch: tf.Tensor) -> tf.Tensor:
        sizes, *_ = orders.sizes(orders.take(), tf.constant(4, tf.int64))
        return batch[: sizes[0]]

    # as in the pipelines of passes: several calls at once, and a buffer behind them
    cuts = orders.admit(batches()).map(cut)
    return cuts.map(lambda rows: rows + 0, num_parallel_calls=2).prefetch(2)


@pytest.mark.full
@pytest.mark.usefixtures("logical_devices")
def test_nothing_is_read_while_it_is_let_go() -> None:
    of_one_device, orders = batches(), ShareQueue(2, lookahead=2, admits=True)
    data = pipeline(orders)
    for _ in range(PASSES):
        for _ in range(2):
            orders.put([1.0, 1.0], 4, fingerprint=False)
        found = [rows.numpy() for rows, _ in zip(data.take(2), range(2), strict=True)]
        np.testing.assert_array_equal(found, [rows[:2] for rows in of_one_device.take(2)])
        orders.clear()


@pytest.mark.usefixtures("logical_devices")
def test_a_closed_queue_ends_the_wait() -> None:
    orders = ShareQueue(2, lookahead=1, admits=True)
    iterator = iter(pipeline(orders))
    orders.close()
    with pytest.raises(tf.errors.OpError):
        next(iterator)
