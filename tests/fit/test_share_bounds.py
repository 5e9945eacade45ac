"""What is remembered of shares that did not fit, and whose they were."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_het.fit.share_bounds import (
    MemoryBounds,
    largest_share_that_fits,
    read_micro_batch_size,
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
    ("shares", "failed", "expected"),
    [([], 10, 5), ([12, 8, 6], 10, 8), ([12, 0], 11, 5), ([10, 6], 10, 6)],
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


def without_memory(sizes=None):
    return SimpleNamespace(
        layout=SimpleNamespace(local_replicas=range(2, 5)),
        extended=SimpleNamespace(
            worker_devices=GPUS,
            micro_batch_sizes=sizes,
            compute_times=SimpleNamespace(sizes_at_a_time=lambda sizes: sizes),
        ),
        current_shares=(1, 1, 8, 8, 8),
    )


def lacks(batches):
    raise tf.errors.ResourceExhaustedError(None, None, "on device:GPU:1")


@pytest.mark.parametrize(
    ("shares", "failed", "expected"), [([], 10, 2), ([12, 8, 6], 10, 4), ([2, 0], 11, 2)]
)
def test_the_most_samples_that_were_computed_at_a_time(shares, failed, expected):
    """Shares of 10 and 11 in parts of at most 5 have parts of 5 and 4."""
    rows = [{"shares": [99, share]} for share in shares]
    assert largest_share_that_fits(1, failed, rows, micro_batch_size=5) == expected


@pytest.mark.parametrize("is_remembered", [False, True])
def test_too_large_a_micro_batch_is_smaller_in_the_next_start(tmp_path, is_remembered):
    memory = MemoryBounds(tmp_path if is_remembered else None)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"micro_batch_size=\{3: 2\}") as e:
        memory.run_step(without_memory([4, 4, 4, 5, 4]), [], lacks, None)
    assert ("BatchBalancer remembers" in e.value.message) == is_remembered
    again = without_memory([4, 4, 4, 5, 4])
    assert memory.apply(again) == {}  # shares stay as large
    assert again.extended.micro_batch_sizes == [4, 4, 4, 2 if is_remembered else 5, 4]
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"micro_batch_size=\{3: 1\}"):
        memory.run_step(without_memory([1] * 5), [], lacks, None)


def test_auto_cuts_what_was_a_whole_share_that_did_not_fit(tmp_path):
    memory, sizes = MemoryBounds(tmp_path), read_micro_batch_size("auto", 5)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"micro_batch_size=\{3: 6\}"):
        memory.run_step(without_memory(sizes), [{"shares": [1, 1, 6, 6, 6]}], lacks, None)
    again = without_memory(sizes)
    assert memory.apply(again) == {}
    assert again.extended.micro_batch_sizes == [*sizes[:3], 6, sizes[4]]
    whole = without_memory()
    assert memory.apply(whole) == {3: 6}  # a bound of the share without micro-batches
    assert whole.extended.micro_batch_sizes is None


@pytest.mark.parametrize("is_remembered", [False, True])
def test_what_to_do_stands_behind_the_error(tmp_path, is_remembered):
    """Which has hundreds of lines: what to do must be the last one on the screen."""
    strategy = without_memory()
    memory = MemoryBounds(tmp_path if is_remembered else None)

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        memory.run_step(strategy, [{"shares": [1, 1, 6, 6, 6]}], lacks, None)
    first, advice = caught.value.message.splitlines()
    assert first == "on device:GPU:1"
    assert advice.startswith("Out of memory on replica(s) [3].")
    assert "max_share={3: 6}" in advice
    assert ("BatchBalancer remembers" in advice) == is_remembered
    assert memory.read() == ({3: 6} if is_remembered else {})
