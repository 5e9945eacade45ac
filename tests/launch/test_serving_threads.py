"""A serving process computes an operation in one thread, and several operations side by side."""

import subprocess
import sys

PROGRAM = """
import tensorflow as tf
from keras_het.launch.serve_command import compute_without_splitting
compute_without_splitting()
threads = tf.config.threading
print(threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads())
tf.constant(1.0) + 1.0
compute_without_splitting()  # has no effect any more, and nothing to do
tf.config.threading.set_intra_op_parallelism_threads(2)
"""


def test_one_thread_an_operation():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1 0\n"
    assert "RuntimeError" in done.stderr and "after initialization" in done.stderr
