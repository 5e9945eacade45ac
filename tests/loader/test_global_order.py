"""Every sample once and in order, whatever the shares, the workers and the pipeline."""

import numpy as np
import pytest
import tensorflow as tf
from depth import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pipelines import ALL, ELEMENT, SLICE, indices
from workers import Schedule, collect, make_workers, plain, reference

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout, apportion

ONE = ReplicaLayout((1,), 0)


def pair(batches, sizes):
    return batches, sizes


@st.composite
def clusters(draw):
    counts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    weight = st.one_of(st.just(0), st.integers(1, 9), st.floats(0.1, 5))
    vector = st.lists(weight, min_size=sum(counts), max_size=sum(counts)).filter(any)
    schedule = draw(st.lists(vector, min_size=1, max_size=10))
    return counts, schedule, draw(st.integers(0, 3))


@pytest.mark.quick("shuffle_map", "map_after_batch", "padded_batch", "generator", "sparse")
@pytest.mark.parametrize("name", ALL)
@examples(2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cluster=clusters())
def test_every_row_once_in_order_under_changing_shares(name, cluster):
    counts, schedule, lookahead = cluster
    workers = make_workers(ALL[name], counts, schedule, lookahead=lookahead)
    # the original of this one may change its order
    original = ALL["map" if name == "dense_with_options" else name]()
    for epoch in range(2):
        calls_before = workers[0]._weights.calls
        batches, sizes = collect([iter(worker) for worker in workers], counts)
        assert batches == reference(original), f"epoch {epoch}"
        for step, (rows, size) in enumerate(zip(batches, sizes, strict=True)):
            # one look at the weights a step, in effect `lookahead` steps later
            weights = schedule[min(calls_before + step, len(schedule) - 1)]
            assert size == apportion(len(rows), weights)


@pytest.mark.parametrize("name", ALL)
def test_modes(name):
    dataset = GlobalOrderDataset(ALL[name](), ONE, lambda: [1], pair)
    assert dataset.mode == ("element" if name in ELEMENT else "slice"), dataset.reason
    assert (name in SLICE) == (dataset.mode == "slice")
    assert dataset.reason
    assert dataset.cardinality == ALL[name]().cardinality()
    assert isinstance(dataset.cardinality, np.int64)


def test_weights_take_effect_lookahead_steps_later():
    for lookahead in range(4):
        current = [[1, 0]]
        worker = GlobalOrderDataset(
            indices().batch(2),
            ReplicaLayout((2,), 0),
            lambda current=current: current[0],
            pair,
            lookahead=lookahead,
        )
        iterator = iter(worker)
        sizes = [next(iterator)[1].tolist()]
        current[0] = [0, 1]
        sizes += [next(iterator)[1].tolist() for _ in range(5)]
        assert sizes == [[2, 0]] * (1 + lookahead) + [[0, 2]] * (5 - lookahead)


def test_shares_change_without_a_new_pipeline():
    schedule = [[4, 1], [1, 4], [0, 1], [1, 0]] * 8
    worker = make_workers(ELEMENT["map"], (2,), schedule)[0]
    for _ in worker:
        pass
    assert worker.pipelines_built == 1


def test_a_new_share_needs_no_new_trace():
    schedule = [[a, 8 - a] for a in range(9)]
    worker = make_workers(lambda: tf.data.Dataset.range(160).batch(8), (2,), schedule)[0]
    traces = []

    @tf.function(input_signature=[worker.element_spec])
    def step(batch):
        traces.append(1)
        return tf.reduce_sum(batch)

    total = sum(int(step(batch)) for batches, _ in worker for batch in batches)
    assert total == sum(range(160))
    assert len(traces) == 1


@pytest.mark.quick("2")
@pytest.mark.parametrize("parallel", [None, 2])
def test_each_sample_is_mapped_once_over_all_workers(parallel):
    calls = [[], [], []]

    def build(worker):
        def costly(index):
            def count(value):
                calls[worker].append(int(value))
                return np.float32(value)

            return tf.ensure_shape(tf.numpy_function(count, [index], tf.float32), [])

        return indices().map(costly, num_parallel_calls=parallel).shuffle(9, seed=1).batch(5)

    builds = iter(range(3))
    schedule = [[4, 2, 1], [1, 0, 6], [0, 0, 1], [1, 1, 1]]
    workers = make_workers(lambda: build(next(builds)), (1, 1, 1), schedule)
    delivered = [[], [], []]
    iterators = [iter(worker) for worker in workers]
    for elements in zip(*iterators, strict=True):
        for worker, (batches, _) in enumerate(elements):
            delivered[worker] += plain(batches[0])
    assert sorted(value for own in calls for value in own) == list(range(23))
    assert [sorted(each) for each in calls] == [sorted(each) for each in delivered]


def test_single_samples_are_batched():
    counts = (1, 2)
    build = lambda: indices().map(lambda i: (i, i * i))  # noqa: E731
    workers = make_workers(build, counts, [[1, 2, 3]], global_batch_size=10)
    batches, sizes = collect([iter(worker) for worker in workers], counts)
    assert batches == reference(build(), 10)
    assert [sum(size) for size in sizes] == [10, 10, 3]
    assert workers[0].cardinality == 3
    assert workers[0].mode == "element"


def test_batch_map_runs_on_local_rows():
    seen = []

    def note(x):
        seen.append(x.shape[0])
        return tf.numpy_function(lambda rows: rows + 100, [x], tf.int64)

    workers = make_workers(
        lambda: indices().batch(5), (1, 1), [[4, 1], [5, 0]], batch_map=note, lookahead=0
    )
    rows = [[], []]
    for elements in zip(*[iter(worker) for worker in workers], strict=True):
        for worker, (batches, _) in enumerate(elements):
            rows[worker] += plain(batches[0])
    assert rows[0] + rows[1] != []
    assert sorted(rows[0] + rows[1]) == [100 + index for index in range(23)]
    assert len(rows[1]) == 1
    assert seen == [None, None]  # one trace on each worker, of any number of rows


@pytest.mark.full
def test_empty_shares_keep_structure_types_and_inner_shapes():
    for name in ELEMENT:
        workers = make_workers(ELEMENT[name], (2,), [[1, 0]])
        full, empty = next(iter(workers[0]))[0]
        tf.nest.assert_same_structure(full, empty)
        for one, none in zip(tf.nest.flatten(full), tf.nest.flatten(empty), strict=True):
            if one is not None:
                assert type(one) is type(none)
                assert one.dtype == none.dtype
                if isinstance(one, tf.Tensor):
                    assert none.shape == [0, *one.shape[1:]]


@pytest.mark.full
def test_a_lone_zero_share_gets_empty_batches():
    for name in ("two_maps", "ragged_result", "unknown_shapes", "sparse_result"):
        workers = make_workers(ELEMENT[name], (1, 1), [[1, 0]])
        full, empty = (next(iter(worker))[0][0] for worker in workers)
        for one, none in zip(tf.nest.flatten(full), tf.nest.flatten(empty), strict=True):
            if one is not None:
                assert none.shape[0] == 0
                assert none.shape.rank == one.shape.rank
                assert none.dtype == one.dtype


def test_a_second_dataset_object_continues_with_the_shuffle_orders():
    original, dataset = ELEMENT["map_shuffle"](), ELEMENT["map_shuffle"]()
    for _ in range(3):
        worker = GlobalOrderDataset(dataset, ONE, Schedule([[1]]), pair)
        assert collect([iter(worker)], (1,))[0] == reference(original)


def test_fingerprints_tell_orders_apart():
    seeded = make_workers(ELEMENT["shuffle_map"], (1, 1), [[1, 1]])
    unseeded = make_workers(lambda: indices().shuffle(50).batch(23), (1, 1), [[1, 1]])
    for workers in (seeded, unseeded):
        assert [worker.fingerprint for worker in workers] == [None, None]
        for worker in workers:
            next(iter(worker))
    assert seeded[0].fingerprint == seeded[1].fingerprint
    assert unseeded[0].fingerprint != unseeded[1].fingerprint
    first = seeded[0].fingerprint
    for _ in range(2):
        for _ in seeded[0]:
            pass
    assert seeded[0].fingerprint != first


@pytest.mark.full
def test_no_fingerprint_of_random_values():
    def augment(index):
        return tf.cast(index, tf.float32) + tf.random.uniform([])

    sliced = make_workers(
        lambda: indices().map(augment).batch(5).map(lambda x: x[::-1]), (1,), [[1]]
    )[0]
    by_element = make_workers(lambda: indices().map(augment).batch(5), (1,), [[1]])[0]
    for worker in (sliced, by_element):
        next(iter(worker))
    assert sliced.fingerprint is None
    assert by_element.fingerprint is not None


def test_fingerprint_is_the_same_in_every_process():
    worker = make_workers(lambda: tf.data.Dataset.range(4).batch(4), (1,), [[1]])[0]
    next(iter(worker))
    assert worker.fingerprint == 2081706778204584629


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match=r"must be a tf\.data\.Dataset"):
        GlobalOrderDataset(np.zeros(3), ONE, lambda: [1], pair)
    with pytest.raises(ValueError, match="leading batch dimension"):
        GlobalOrderDataset(indices(), ONE, lambda: [1], pair)
    with pytest.raises(ValueError, match="one weight for each of the 1 replicas"):
        next(iter(GlobalOrderDataset(indices().batch(2), ONE, lambda: [1, 2], pair)))


def test_parts_with_different_numbers_of_rows_are_refused():
    element = (np.zeros([4, 2]), np.zeros([3]))
    known = lambda: tf.data.Dataset.from_tensors(element)  # noqa: E731
    with pytest.raises(ValueError, match="leading batch dimension, the same for all"):
        next(iter(make_workers(known, (1,), [[1]])[0]))
    specs = (tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([None], tf.float64))
    unknown = lambda: tf.data.Dataset.from_generator(  # noqa: E731
        lambda: iter([element]), output_signature=specs
    )
    with pytest.raises(ValueError, match="different numbers of rows"):
        next(iter(make_workers(unknown, (1,), [[1]])[0]))
