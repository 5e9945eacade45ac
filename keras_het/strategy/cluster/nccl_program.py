"""A sum by NCCL between the GPUs that are its arguments; fails, or waits for ever, if it cannot."""

from __future__ import annotations

import sys

import tensorflow as tf


def sum_between(devices: list[str]) -> float:
    """Sum 1 on every device; return what the first one has."""
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.NcclAllReduce(num_packs=1)
    )

    @tf.function
    def total() -> tf.Tensor:
        def one() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([1024]))

        return strategy.experimental_local_results(strategy.run(one))[0][0]

    return float(total())


if __name__ == "__main__":
    received = sum_between(sys.argv[1:])
    if received != len(sys.argv) - 1:
        sys.exit(f"Received: the sum {received} of {len(sys.argv) - 1} ones.")
