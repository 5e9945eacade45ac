"""Own files on each worker: every sample once, the same steps everywhere."""

import pytest
import tensorflow as tf
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from workers import Schedule, collect

from keras_het.loader import FileShardedDataset
from keras_het.loader.input.step_iterator import number_of
from keras_het.planning import ReplicaLayout

LINES = (7, 3, 12, 1, 5, 9)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    paths = []
    for index, count in enumerate(LINES):
        path = folder / f"{index}.txt"
        path.write_text("".join(f"{index}.{line}\n" for line in range(count)))
        paths.append(str(path))
    return paths


def make(files, counts, weights, **options):
    options = {"global_batch_size": 8, "samples_per_file": LINES, **options}
    return [
        FileShardedDataset(
            files,
            tf.data.TextLineDataset,
            ReplicaLayout(counts, index),
            Schedule(weights),
            lambda batches, sizes: (batches, sizes),
            **options,
        )
        for index in range(len(counts))
    ]


EXPECTED = sorted(
    repr((f"{index}.{line}".encode(),)) for index, n in enumerate(LINES) for line in range(n)
)


@examples(4, quick=2)
@given(
    schedule=st.lists(
        st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any), min_size=1, max_size=6
    )
)
def test_every_sample_once_under_changing_shares(files, schedule):
    counts = (1, 2, 1)
    workers = make(files, counts, schedule)
    for _ in range(2):
        batches, sizes = collect([iter(worker) for worker in workers], counts)
        assert [sum(size) for size in sizes] == [8, 8, 8, 8, 5]
        assert sorted(row for batch in batches for row in batch) == EXPECTED
    assert len(workers[0]) == 5


def test_each_worker_reads_its_own_files_only(files):
    workers = make(files, (1, 1), [[3, 1]])
    assert workers[0].files == workers[1].files
    for index, worker in enumerate(workers):
        rows = [row for batches, _ in worker for row in batches[0].numpy().tolist()]
        assert {int(row.split(b".")[0]) for row in rows} == set(workers[0].files[index])


def test_a_worker_without_files_gets_empty_batches(files):
    workers = make(files[:1], (1, 1), [[1, 1]], samples_per_file=LINES[:1], global_batch_size=4)
    batches, sizes = collect([iter(worker) for worker in workers], (1, 1))
    assert sizes == [(4, 0), (3, 0)]
    assert len(batches) == 2


@pytest.mark.full
def test_samples_are_counted_and_mapped_where_they_are_used(files):
    calls = []

    def note(line):
        def call(value):
            calls.append(value)
            return value

        return tf.ensure_shape(tf.numpy_function(call, [line], tf.string), [])

    workers = make(files, (1, 1), [[1, 1]], samples_per_file=None, map_function=note)
    probes = len(calls)
    assert probes == 2  # one sample a worker tells the structure
    collect([iter(worker) for worker in workers], (1, 1))
    assert len(calls) - probes == sum(LINES)


def test_a_mapped_copy_is_another_one_in_a_graph(files):
    (worker,) = make(files, (1,), [[1]])
    number = number_of(worker)
    assert number_of(worker.map(lambda line: line)) != number == number_of(worker)


def test_resume_with_unchanged_shares(files):
    options = {"shuffle_buffer": 5, "seed": 3}
    whole = make(files, (1, 1), [[2, 1]], **options)
    epochs = [collect([iter(worker) for worker in whole], (1, 1))[0] for _ in range(3)]
    assert epochs[0] != epochs[1]
    resumed = make(files, (1, 1), [[2, 1]], **options)
    for worker in resumed:
        worker.start_at(1, 2)
    assert collect([iter(worker) for worker in resumed], (1, 1))[0] == epochs[1][2:]
    assert collect([iter(worker) for worker in resumed], (1, 1))[0] == epochs[2]


def test_wrong_numbers_are_refused(files):
    with pytest.raises(ValueError, match="one number for each of the 6 files"):
        make(files, (1,), [[1]], samples_per_file=[1])
    with pytest.raises(ValueError, match="a list of paths of files"):
        make([], (1,), [[1]], samples_per_file=[])
    worker = make(files, (1,), [[1]], samples_per_file=[20] * 6)[0]
    with pytest.raises(ValueError, match="fewer samples than samples_per_file"):
        list(worker)
