"""Threads of a process that does nothing but serve."""

import tensorflow as tf


def compute_without_splitting() -> None:
    """Lets one thread compute an operation as a whole.

    An update of a partition takes well below a millisecond: to share it out among threads, and to
    wake them, takes longer than it saves, and from the threads that carry messages. Partitions
    and clients are what goes on side by side. To be called before TensorFlow's first operation.

    Raises:
        RuntimeError: if that was.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
