"""The even split."""

from __future__ import annotations

from keras_het.planning.balance.policy import SharePolicy


class EvenPolicy(SharePolicy):
    """Every replica gets the same number of samples, as in plain data parallelism.

    The split of `tf.distribute.MirroredStrategy` and of PyTorch's DistributedDataParallel: a step
    takes as long as the slowest replica needs. The baseline of all other policies.

    Args:
        num_replicas: number of replicas, n.
        global_batch_size: samples that shares sum to.
        lower: smallest share of each replica, int [n]; by default 0.
        upper: largest share of each replica, int [n]; by default no bound.

    Reference:
        Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981.
    """

    name = "even"
