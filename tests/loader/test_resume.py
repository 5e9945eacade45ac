"""A resumed epoch continues at the right sample, in the right order, without mapping the rest."""

import numpy as np
import pytest
import tensorflow as tf
from depth import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pipelines import ALL, indices
from workers import collect, make_workers

PIPELINES = [
    "map", "shuffle_map", "map_shuffle", "map_shuffle_once", "two_maps", "repeat_take_skip",
    "shuffle_shuffle", "unknown_size", "map_above_cache", "no_map", "map_after_batch",
    "ragged_batch", "generator", "interleave", "shuffled_arrays", "mapped_arrays",
]  # fmt: skip


def one_epoch(worker):
    return collect([iter(worker)], (1,))[0]


@pytest.mark.quick("shuffle_map", "no_map", "generator", "map_after_batch")
@pytest.mark.parametrize("name", PIPELINES)
@examples(2, suppress_health_check=[HealthCheck.too_slow])
@given(epoch=st.integers(0, 2), step=st.integers(0, 3))
def test_continues_as_if_never_stopped(name, epoch, step):
    whole = make_workers(ALL[name], (1,), [[1]])[0]
    expected = [one_epoch(whole) for _ in range(epoch + 2)]
    step = min(step, len(expected[epoch]) - 1)
    resumed = make_workers(ALL[name], (1,), [[1]])[0]
    resumed.start_at(epoch, step)
    next(iter(resumed))  # Keras's look
    iterator = iter(resumed)
    assert collect([iterator], (1,))[0] == expected[epoch][step:]
    assert iterator.step == len(expected[epoch])
    assert iterator.pass_number == epoch
    assert one_epoch(resumed) == expected[epoch + 1]


@pytest.mark.quick("no_map")
@pytest.mark.parametrize("name", ["map_shuffle", "no_map"])
def test_goes_back_after_epochs_were_run(name):
    worker = make_workers(ALL[name], (1,), [[1]])[0]
    epochs = [one_epoch(worker) for _ in range(3)]
    next(iter(worker))
    for epoch in (1, 0, 2):
        worker.start_at(epoch, 1)
        assert one_epoch(worker) == epochs[epoch][1:]
    worker.start_at(1, 2)
    assert [one_epoch(worker) for _ in range(2)] == [epochs[1][2:], epochs[2]]


def test_skipped_samples_are_not_mapped():
    mapped = []

    def note(index):
        def count(value):
            mapped.append(int(value))
            return value

        return tf.ensure_shape(tf.numpy_function(count, [index], tf.int64), [])

    worker = make_workers(lambda: indices().map(note).shuffle(5, seed=1).batch(5), (1,), [[1]])[0]
    worker.start_at(2, 3)
    rows = one_epoch(worker)
    assert sorted(f"({value},)" for value in mapped) == sorted(
        row for batch in rows for row in batch
    )
    assert len(mapped) == 23 - 15


def test_what_cannot_go_back_says_so():
    def build():
        return indices().shuffle(5, seed=1).map(lambda i: (i, i)).batch(5).unbatch().batch(4)

    worker = make_workers(build, (1,), [[1]])[0]
    worker.start_at(1, 1)  # nothing was run yet
    one_epoch(worker)
    with pytest.raises(ValueError, match="Cannot go back to an earlier order"):
        worker.start_at(0, 0)


CANNOT_GO_BACK = {
    "filter": lambda shuffled: shuffled.filter(lambda i: i >= 0),
    "unbatch": lambda shuffled: shuffled.batch(5).unbatch(),
    "flat_map": lambda shuffled: shuffled.flat_map(tf.data.Dataset.from_tensors),
    "repeat": lambda shuffled: shuffled.filter(lambda i: i >= 0).repeat(2),
    "two shuffles": lambda shuffled: shuffled.shuffle(5, seed=2).filter(lambda i: i >= 0),
}


@pytest.mark.quick("passes1-2-filter", "passes3-3-two shuffles", "passes4-1-repeat")
@pytest.mark.parametrize("above", CANNOT_GO_BACK.values(), ids=CANNOT_GO_BACK)
@pytest.mark.parametrize(
    ("passes", "step"),
    [((), 0), ((), 2), ((True,), 0), ((True, True), 3), ((True, False), 1), ((3,), 1)],
)
def test_a_look_at_the_first_batch_does_not_keep_a_worker_from_resuming(above, passes, step):
    def build():
        return above(indices().shuffle(23, seed=1)).batch(4)

    fresh, looked = (make_workers(build, (1,), [[1]])[0] for _ in range(2))
    next(iter(looked))  # as workers do who compare it
    for worker in (fresh, looked):
        worker.start_at(passes, step)
    assert one_epoch(looked) == one_epoch(fresh)
    assert one_epoch(looked) == one_epoch(fresh)


def test_negative_positions_are_refused():
    worker = make_workers(ALL["map"], (1,), [[1]])[0]
    with pytest.raises(ValueError, match="zero or more"):
        worker.start_at(-1, 0)
    with pytest.raises(ValueError, match="zero or more"):
        worker.start_at(0, -1)


def test_all_workers_resume_at_the_same_step():
    counts = (1, 2)
    whole = make_workers(ALL["shuffle_map"], counts, [[3, 1, 1]])
    for _ in range(2):
        expected, _ = collect([iter(worker) for worker in whole], counts)
    resumed = make_workers(ALL["shuffle_map"], counts, [[0, 1, 1]])
    for worker in resumed:
        worker.start_at(1, 2)
    batches, _ = collect([iter(worker) for worker in resumed], counts)
    assert batches == expected[2:]
    assert len({worker.fingerprint for worker in resumed}) == 1
    assert np.all([worker.fingerprint is not None for worker in resumed])


@pytest.mark.quick("shuffled_arrays")
@pytest.mark.parametrize("name", ["map_shuffle", "no_map", "shuffled_arrays", "map_after_batch"])
def test_weights_set_after_a_look_count_from_the_first_step(name):
    expected = one_epoch(make_workers(ALL[name], (1,), [[1]])[0])
    weights = [[1, 1]]
    worker = make_workers(ALL[name], (2,), weights)[0]
    next(iter(worker))
    weights[0] = [1, 0]
    worker.cut_again()
    batches, sizes = collect([iter(worker)], (2,))
    assert batches == expected
    assert all(size[1] == 0 for size in sizes)


def test_without_a_look_there_is_nothing_to_cut_again():
    worker = make_workers(ALL["map_shuffle"], (1,), [[1]])[0]
    worker.cut_again()
    iterator = iter(worker)
    next(iterator)
    worker.cut_again()  # in the middle of an epoch: no effect on it
    assert len(one_epoch(make_workers(ALL["map_shuffle"], (1,), [[1]])[0])) == 1 + len(
        collect([iterator], (1,))[0]
    )
