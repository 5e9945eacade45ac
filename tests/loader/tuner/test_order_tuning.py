"""Under the strategy, other knobs within a pass: same rows, same order, same shares, all epochs."""

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf
from depth import examples
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from pipelines import ALL, ELEMENT
from workers import Unchanged, _one_step, make_workers

from keras_het.asynchronous.exchange.claims import GroupClaims
from keras_het.loader import HandoverError, Knobs, pipeline
from keras_het.loader.input.data_pass import ClaimedPass
from keras_het.loader.input.pipeline_pass import PipelinePass

COUNTS = (1, 2)
WEIGHTS = [[1, 2, 1]] * 3 + [[0, 1, 5]] * 4 + [[3, 1, 1]] * 2 + [[1, 0, 2]]
EPOCHS = 3
# epoch, step after which a worker begins, worker, knobs
MOVES = st.lists(
    st.tuples(
        st.integers(0, EPOCHS - 1),
        st.integers(1, 8),
        st.integers(0, 1),
        st.builds(Knobs, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)
PROPERTY = examples(
    4,
    quick=2,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FIRST = Knobs(2, 2, 2)
# as they are in a test with a move in every step
EVERY_STEP = [
    (epoch, step, worker, Knobs(1 + step % 3, 1 + step % 2, 1 + (step + worker) % 4))
    for epoch in range(EPOCHS)
    for step in range(1, 9)
    for worker in range(2)
]


def row(index):
    return {"x": tf.fill([2], tf.cast(index, tf.float32))}, index


def shuffled(knobs):
    rows = tf.data.Dataset.range(47).shuffle(11, seed=4)
    return rows.map(row, knobs.num_parallel_calls).batch(5).prefetch(knobs.prefetch)


def interleaved(knobs):
    blocks = tf.data.Dataset.range(9).shuffle(9, seed=2)
    rows = blocks.interleave(
        lambda block: tf.data.Dataset.range(5 * block, 5 * block + 5),
        cycle_length=2,
        num_parallel_calls=min(knobs.num_parallel_calls, 2),
    )
    return rows.map(row, knobs.num_parallel_calls).batch(4).prefetch(knobs.prefetch)


def unequal_seeds(knobs):
    seed = 5 if knobs == FIRST else 6 + knobs.threads
    rows = tf.data.Dataset.range(40).shuffle(40, seed=seed)
    return rows.map(row, knobs.num_parallel_calls).batch(4)


def repeated(knobs):
    rows = tf.data.Dataset.range(13).shuffle(13, seed=4).repeat(3)
    return rows.map(row, knobs.num_parallel_calls).batch(4)


def cached(knobs):
    rows = tf.data.Dataset.range(40).map(row, knobs.num_parallel_calls).cache()
    rows = rows.shuffle(9, seed=2)
    return rows.map(lambda x, y: (x["x"] + 1, y), knobs.num_parallel_calls).batch(4)


def whole_batches(knobs):
    rows = tf.data.Dataset.range(47).shuffle(11, seed=4)
    rows = rows.map(lambda index: tf.range(index % 4), knobs.num_parallel_calls)
    return rows.padded_batch(5, [3]).prefetch(knobs.prefetch)


BUILDERS = {
    each.__name__: each
    for each in (shuffled, interleaved, unequal_seeds, repeated, cached, whole_batches)
}


@pytest.fixture(scope="module")
def executor():
    with concurrent.futures.ThreadPoolExecutor(1) as made:
        yield made


def in_effect(preparation):
    """Goes on until only further steps can put it into effect."""
    for _ in range(20):
        if preparation.poll():
            return True
        if preparation._future is None:
            return False
        preparation.wait(60)
    raise TimeoutError("A preparation did not come to its end.")


def go_on_until_moved(worker, iterator, knobs, executor):
    preparation, steps = worker.tuning.prepare(knobs, executor), 0
    while not in_effect(preparation):
        assert next(iterator) is not None
        steps += 1
    return steps


def run(build, moves, executor, epochs=EPOCHS, placement=None):
    """Rows and sizes of all steps, and how many moves came into effect."""
    workers = make_workers(build, COUNTS, WEIGHTS, placement)
    seen, done = [], 0
    for epoch in range(epochs):
        iterators, running = [iter(worker) for worker in workers], {}
        for step in range(1000):
            elements = [next(iterator, None) for iterator in iterators]
            if None in elements:
                assert elements == [None] * len(workers), "workers end at different steps"
                break
            seen.append((_one_step(elements, COUNTS), elements[0][1].tolist()))
            for place, knobs in [(m[2], m[3]) for m in moves if m[:2] == (epoch, step + 1)]:
                if place not in running and workers[place].tuning.refusal() is None:
                    running[place] = workers[place].tuning.prepare(knobs, executor)
            for place in [place for place in running if in_effect(running[place])]:
                assert workers[place].tuning.knobs == running.pop(place).knobs
                done += 1
        for preparation in running.values():
            preparation.cancel()
        unused = [iter(worker) for worker in workers]  # as Keras does
        assert len(unused) == len(workers)
        seen.append("end of an epoch")
    return seen, done


def fits(name):
    (worker,) = make_workers(ALL[name], (1,), [[1]])
    return worker.tuning.refusal() is None


@pytest.mark.quick("shuffle_map", "no_map")
@pytest.mark.parametrize("name", ALL)
def test_a_move_in_every_step_changes_nothing(name, executor):
    expected, none = run(ALL[name], [], executor)
    seen, done = run(ALL[name], EVERY_STEP, executor)
    placement = Unchanged()
    ahead, done_ahead = run(ALL[name], EVERY_STEP, executor, placement=placement)
    assert seen == ahead == expected
    assert none == 0 and done == done_ahead
    steps = seen.index("end of an epoch")
    assert bool(done) == (fits(name) and steps > 3), "shares of three steps are settled at once"
    assert bool(placement.placed_ahead) == (steps > 2 and name != "generator")


def over_one_shuffle(end):
    def make():
        rows = tf.data.Dataset.range(47).shuffle(11, seed=4)
        return pipeline(lambda knobs: end(rows, knobs), FIRST)

    return make


ENDS = {
    "samples": lambda rows, knobs: rows.map(row, knobs.num_parallel_calls).batch(5),
    "whole batches": lambda rows, knobs: rows.map(
        lambda index: tf.range(index % 4), knobs.num_parallel_calls
    ).padded_batch(5, [3]),
}


@pytest.mark.quick("whole batches")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_builds_that_share_a_shuffle_continue_in_its_order_or_stay(end, executor):
    def make():
        return end(tf.data.Dataset.range(47).shuffle(11, seed=4), FIRST)

    untouched = run(make, [], executor)[0]
    if end is ENDS["samples"]:
        seen, done = run(over_one_shuffle(end), EVERY_STEP, executor)
        assert done and seen == untouched
        return
    (worker,) = make_workers(over_one_shuffle(end), (1,), [[1]])
    next(iter(worker))
    with pytest.raises(HandoverError, match=r"Call shuffle\(\) within the builder"):
        worker.tuning.moved_form(Knobs(3, 3, 3))


@pytest.mark.full
def test_all_of_element_mode_but_pipelines_that_cannot_be_read_again_can_be_moved():
    assert [name for name in ELEMENT if not fits(name)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDERS)
@PROPERTY
@given(moves=MOVES)
def test_any_moves_of_a_built_pipeline_change_nothing(name, moves, executor):
    build = BUILDERS[name]
    expected, _ = run(lambda: build(FIRST), [], executor)
    assert run(lambda: pipeline(build, FIRST), moves, executor)[0] == expected


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDERS)
def test_a_built_pipeline_is_moved_again_and_again(name, executor):
    build = BUILDERS[name]
    expected, _ = run(lambda: build(FIRST), [], executor)
    seen, done = run(lambda: pipeline(build, FIRST), EVERY_STEP, executor)
    assert seen == expected
    assert done >= 6


@pytest.mark.full
@PROPERTY
@given(moves=MOVES, name=st.sampled_from(["shuffle_map", "repeat_take_skip", "concatenate"]))
def test_any_moves_of_an_ordinary_pipeline_change_nothing(moves, name, executor):
    assert run(ALL[name], moves, executor)[0] == run(ALL[name], [], executor)[0]


def test_the_pool_and_the_calls_are_those_of_the_knobs(executor):
    (worker,) = make_workers(
        lambda: tf.data.Dataset.range(40).map(row, tf.data.AUTOTUNE).batch(4), (1,), [[1]]
    )
    iterator = iter(worker)
    next(iterator)
    go_on_until_moved(worker, iterator, Knobs(6, 2, 3), executor)
    assert worker.form.autotuned_calls == 6
    assert worker.form.options.threading.private_threadpool_size == 3
    assert len(worker.tuning.threads.ids) >= 3
    iterator.close()


@pytest.mark.parametrize(("threads", "calls"), [(None, None), (3, 6)])
def test_calls_with_autotune_follow_the_users_own_pool(threads, calls):
    def build():
        options = tf.data.Options()
        if threads is not None:
            options.threading.private_threadpool_size = threads
        rows = tf.data.Dataset.range(40).map(row, tf.data.AUTOTUNE)
        return rows.batch(4).with_options(options)

    (worker,) = make_workers(build, (1,), [[1]])
    assert worker.mode == "element"
    assert worker.form.autotuned_calls == calls


def test_a_pass_that_ends_before_is_followed_by_another_attempt(executor):
    (worker,) = make_workers(ELEMENT["map_shuffle"], (1,), [[1]])
    iterator = iter(worker)
    elements = [next(iterator) for _ in range(4)]
    preparation = worker.tuning.prepare(Knobs(3, 2, 3), executor)
    assert not in_effect(preparation)  # the shares of all five steps are settled
    elements += list(iterator)
    assert len(elements) == 5
    assert not preparation.poll()
    iterator = iter(worker)
    steps = 0
    for _ in iterator:
        steps += 1
        in_effect(preparation)
    assert steps == 5
    assert preparation.poll()


def test_what_is_given_up_is_dropped(executor, monkeypatch):
    dropped = []
    close = PipelinePass.close
    monkeypatch.setattr(PipelinePass, "close", lambda self: (dropped.append(self), close(self)))
    (worker,) = make_workers(ELEMENT["map"], (1,), [[1]])
    iterator = iter(worker)
    next(iterator)
    preparation = worker.tuning.prepare(Knobs(3, 2, 3), executor)
    preparation.poll()
    preparation.wait(60)
    preparation.cancel()
    assert len(dropped) == 1
    assert len(list(iterator)) == 4


def test_settled_shares_cannot_be_taken_over():
    (worker,) = make_workers(ELEMENT["map"], (1,), [[1]])
    iterator = iter(worker)
    next(iterator)
    late = worker.successor(worker.running, worker.form, worker.running.ordered - 1)
    with pytest.raises(ValueError, match="steps are ordered"):
        worker.running.join(late, lambda: None)
    late.close()
    iterator.close()


REFUSED = {
    "no seed": (lambda: tf.data.Dataset.range(20).shuffle(20).map(row).batch(5), "no seed"),
    "another order": (
        lambda: (
            tf.data.Dataset.range(20)
            .interleave(
                lambda i: tf.data.Dataset.range(i, i + 2),
                cycle_length=2,
                num_parallel_calls=2,
                deterministic=False,
            )
            .cache()
            .map(row)
            .batch(5)
        ),
        "deterministic=False",
    ),
    "Python": (
        lambda: (
            tf.data.Dataset.range(20)
            .filter(lambda i: tf.numpy_function(lambda j: j > 2, [i], tf.bool))
            .map(row)
            .batch(5)
        ),
        "a Python function in Filter",
    ),
    "random": (
        lambda: (
            tf.data.Dataset.range(20).filter(lambda i: tf.random.uniform([]) < 2).map(row).batch(5)
        ),
        "draws random values",
    ),
    "generator": (ALL["generator"], "from_generator"),
    "cached batches": (ALL["cache_after_batch"], "cache in memory"),
    "several orders": (
        lambda: pipeline(
            lambda knobs: tf.data.Dataset.range(20).shuffle(20, seed=1).repeat(2).batch(5), FIRST
        ),
        "several orders",
    ),
    "shuffled slices": (ALL["no_map"], "with a shuffle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name, executor):
    tf.random.set_seed(None)  # of an earlier test, with which every shuffle would have one
    build, reason = REFUSED[name]
    (worker,) = make_workers(build, (1,), [[1]])
    iterator = iter(worker)
    next(iterator)
    with pytest.raises(HandoverError, match=reason):
        worker.tuning.prepare(Knobs(2, 2, 2), executor).poll()
    iterator.close()


def test_a_cache_in_files_is_refused(tmp_path):
    def build():
        return tf.data.Dataset.range(20).cache(str(tmp_path / "kept")).map(row).batch(5)

    (worker,) = make_workers(build, (1,), [[1]])
    assert "cache in files" in worker.tuning.refusal()


def test_a_pass_of_which_others_take_a_part_is_refused():
    (worker,) = make_workers(ELEMENT["map"], (1,), [[1]])
    worker._last = ClaimedPass(None, GroupClaims(()), 1, 0)
    assert "async workers" in worker.tuning.refusal()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda knobs: shuffled(knobs).unbatch().batch(4 + knobs.threads), "batch size"),
        (
            lambda knobs: shuffled(knobs) if knobs == FIRST else whole_batches(knobs),
            "another kind|batch size",
        ),
        (
            lambda knobs: (
                shuffled(knobs)
                if knobs == FIRST
                else tf.data.Dataset.range(47).map(lambda i: i).batch(5)
            ),
            "samples or maps",
        ),
    ],
)
def test_builders_of_something_else_are_refused(change, reason, executor):
    (worker,) = make_workers(lambda: pipeline(change, FIRST), (1,), [[1]])
    iterator = iter(worker)
    next(iterator)
    preparation = worker.tuning.prepare(Knobs(3, 2, 4), executor)
    with pytest.raises(HandoverError, match=reason):
        in_effect(preparation)
    iterator.close()


@pytest.mark.full
def test_weights_of_workers_follow_their_shares():
    workers = make_workers(ELEMENT["map"], (1, 1), [[3, 1]])
    iterators = [iter(worker) for worker in workers]
    for iterator in iterators:
        next(iterator)
    np.testing.assert_allclose([worker.tuning.weight for worker in workers], [1.5, 0.5])
    for iterator in iterators:
        iterator.close()
