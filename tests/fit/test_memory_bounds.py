"""What is remembered of shares that did not fit, and whose they were."""

import pytest
import tensorflow as tf

from keras_het.fit.memory_bounds import (
    MemoryBounds,
    largest_share_that_fits,
    note_out_of_memory,
    replicas_without_memory,
)

GPUS = tuple(f"/job:worker/replica:0/task:1/device:GPU:{index}" for index in range(3))


def test_bounds_outlive_the_process(tmp_path):
    assert MemoryBounds(tmp_path / "bounds").read() == {}
    MemoryBounds(tmp_path / "bounds").write(2, 30)
    MemoryBounds(tmp_path / "bounds").write(0, 7)
    MemoryBounds(tmp_path / "bounds").write(2, 20)
    assert MemoryBounds(tmp_path / "bounds").read() == {0: 7, 2: 20}


@pytest.mark.parametrize(
    ("shares", "failed", "expected"), [([], 10, 5), ([12, 8, 6], 10, 8), ([12, 0], 11, 5)]
)
def test_the_largest_share_that_was_computed(shares, failed, expected):
    rows = [{"shares": [99, share]} for share in shares]
    assert largest_share_that_fits(1, failed, rows) == expected


def test_the_message_names_the_device():
    message = (
        "OOM when allocating tensor with shape[512,512] and type float on "
        "/job:worker/replica:0/task:1/device:GPU:2 by allocator GPU_2_bfc"
    )
    assert replicas_without_memory(message, GPUS, first=4) == [6]
    assert replicas_without_memory("no device here", GPUS, first=4) == [4, 5, 6]


def test_what_to_do_stands_behind_the_error():
    """Which has hundreds of lines: what to do must be the last one on the screen."""

    def lacks(batches):
        raise tf.errors.ResourceExhaustedError(None, None, "on device:GPU:1")

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        note_out_of_memory(lambda message: f"do: {message}", lacks, None)
    assert caught.value.message == "on device:GPU:1\ndo: on device:GPU:1"
