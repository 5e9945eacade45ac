"""Under the strategy, other knobs within a pass: same rows, same order, same shares, all epochs."""

import concurrent.futures
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from pipelines import ALL, ELEMENT
from workers import Unchanged, _one_step, make_workers

from keras_het.asynchronous.exchange.claims import GroupClaims
from keras_het.loader import HandoverError, Knobs, tunable_pipeline
from keras_het.loader.input.data_pass import ClaimedPass

COUNTS = (1, 2)
WEIGHTS = [[1, 2, 1]] * 3 + [[0, 1, 5]] * 4 + [[3, 1, 1]] * 2 + [[1, 0, 2]]
EPOCHS = 3
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


def in_effect(change):
    """Continues until only further steps can put it into effect."""
    for _ in range(20):
        if change.poll():
            return True
        if change._future is None:
            return False
        change.wait(60)
    raise TimeoutError("A change did not come to its end.")


def run(build, moves, executor, epochs=EPOCHS, placement=None, counts=COUNTS):
    """Rows and sizes of all steps, and how many moves came into effect."""
    weights = [each[: sum(counts)] for each in WEIGHTS]
    workers = make_workers(build, counts, weights, placement)
    seen, done = [], 0
    for epoch in range(epochs):
        iterators, running = [iter(worker) for worker in workers], {}
        for step in range(1000):
            elements = [next(iterator, None) for iterator in iterators]
            if None in elements:
                assert elements == [None] * len(workers), "workers end at different steps"
                break
            seen.append((_one_step(elements, counts), elements[0][1].tolist()))
            for place, knobs in [(m[2], m[3]) for m in moves if m[:2] == (epoch, step + 1)]:
                if (
                    place < len(workers)
                    and place not in running
                    and workers[place].tuning.refusal() is None
                ):
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


@pytest.mark.quick("no_map")
@pytest.mark.parametrize("name", ALL)
def test_a_move_in_every_step_changes_nothing(name, executor):
    expected, none = run(ALL[name], [], executor)
    seen, done = run(ALL[name], EVERY_STEP, executor)
    placement = Unchanged()
    ahead, done_ahead = run(ALL[name], EVERY_STEP, executor, placement=placement)
    assert seen == ahead == expected
    assert none == 0 and done == done_ahead
    steps = seen.index("end of an epoch")
    assert bool(done) == fits(name)
    assert bool(placement.placed_ahead) == (steps > 2 and name != "generator")


def over_one_shuffle(end):
    def make():
        rows = tf.data.Dataset.range(47).shuffle(11, seed=4)
        return tunable_pipeline(lambda knobs: end(rows, knobs), FIRST)

    return make


def samples_of(rows, knobs):
    return rows.map(row, knobs.num_parallel_calls).batch(5)


def slices_of(rows, knobs):
    batches = rows.map(lambda index: tf.range(index % 4), knobs.num_parallel_calls)
    return batches.padded_batch(5, [3])


def slices(knobs):
    return tf.data.Dataset.range(47).map(row).filter(lambda x, y: y > 2).batch(5)


def samples(knobs):
    return tf.data.Dataset.range(47).map(row, knobs.num_parallel_calls).batch(5)


@pytest.mark.full
def test_samples_whose_builds_share_a_shuffle_are_tuned(executor):
    def untouched():
        return samples_of(tf.data.Dataset.range(47).shuffle(11, seed=4), FIRST)

    seen, done = run(over_one_shuffle(samples_of), EVERY_STEP, executor)
    assert done and seen == run(untouched, [], executor)[0]


def test_whole_batches_whose_builds_share_a_shuffle_stay(executor):
    (worker,) = make_workers(over_one_shuffle(slices_of), (1,), [[1]])
    next(iter(worker))
    with pytest.raises(HandoverError, match=r"Call shuffle\(\) within the builder"):
        worker.tuning.moved_form(Knobs(3, 3, 3))


def test_all_of_element_mode_can_be_tuned():
    assert [name for name in ELEMENT if not fits(name)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDERS)
def test_a_built_pipeline_is_moved_again_and_again(name, executor):
    build = BUILDERS[name]
    expected, _ = run(lambda: build(FIRST), [], executor)
    seen, done = run(lambda: tunable_pipeline(build, FIRST), EVERY_STEP, executor)
    assert seen == expected
    assert done >= 6


class Together:
    """Notes how many calls of a map run at once, each of them as long as others may join it."""

    def __init__(self):
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __call__(self, index):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.01)
        with self._lock:
            self._now -= 1
        return index

    def row(self, index):
        return tf.ensure_shape(tf.numpy_function(self, [index], tf.int64), [])


MAPS = {
    "AUTOTUNE": (lambda f: tf.data.Dataset.range(900).map(f, -1).batch(30), [2, 8, 2]),
    "built": (
        lambda f: tunable_pipeline(
            lambda knobs: tf.data.Dataset.range(900).map(f, knobs.num_parallel_calls).batch(30),
            Knobs(3, 2, 3),
        ),
        [2, 8, 2],
    ),
    "the user's number": (lambda f: tf.data.Dataset.range(900).map(f, 3).batch(30), [6, 6, 6]),
    "sequential": (lambda f: tf.data.Dataset.range(900).map(f).batch(30), [2, 2, 2]),
}


@pytest.mark.quick("AUTOTUNE")
@pytest.mark.parametrize(("make", "expected"), MAPS.values(), ids=MAPS)
def test_as_many_calls_run_at_once_as_there_are_loaders(make, expected, executor):
    """Of two steps together; within the running pass, which reads each number once."""
    calls = Together()
    (worker,) = make_workers(lambda: make(calls.row), (1,), [[1]])
    worker.tuning.begin()
    iterator, most, numbers = iter(worker), [], []
    for threads in (2, 8, 2):
        assert worker.tuning.prepare(Knobs(2 * threads, 2, threads), executor).poll()
        numbers += [next(iterator) for _ in range(1 + worker.lookahead)]  # ordered before
        calls.most = 0
        numbers += [next(iterator) for _ in range(4)]
        most.append(calls.most)
    assert all(found <= bound for found, bound in zip(most, expected, strict=True))
    assert most[1] > expected[1] // 2, "of both steps"
    assert worker.pipelines_built == 2, "the one for the types of its batches, and this"
    found = np.concatenate([batches[0].numpy() for batches, _ in numbers])
    np.testing.assert_array_equal(found, np.arange(len(found)))
    iterator.close()


def test_own_threads_serve_the_tuned_pass_only(executor):
    (worker,) = make_workers(ELEMENT["map"], (1,), [[1]])
    next(iter(worker))
    assert len(worker.tuning.threads.ids) == 0
    iterator = iter(worker)  # which begins again: the first element was looked at only
    worker.tuning.begin()
    next(iterator)
    assert len(worker.tuning.threads.ids) >= 64
    assert worker.form.options.threading.private_threadpool_size is None
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


NOT_TWICE = {
    "no seed": lambda rows: rows.shuffle(40),
    "another order": lambda rows: rows.interleave(
        lambda i: tf.data.Dataset.from_tensors(i), 2, num_parallel_calls=2, deterministic=False
    ),
    "Python": lambda rows: rows.filter(lambda i: tf.numpy_function(lambda j: j >= 0, [i], tf.bool)),
    "random": lambda rows: rows.filter(lambda i: tf.random.uniform([]) < 2),
}


@pytest.mark.quick("Python")
@pytest.mark.parametrize("name", NOT_TWICE)
def test_what_would_be_another_order_if_read_again_is_tuned_too(name, executor):
    rows = NOT_TWICE[name](tf.data.Dataset.range(40))
    seen, done = run(lambda: rows.map(row, -1).batch(5), EVERY_STEP, executor, counts=(2,))
    numbers = [
        int(text.split()[-1][:-1]) for step in seen[:-1] if len(step) == 2 for text in step[0]
    ]
    assert done >= 6
    assert sorted(numbers) == sorted(3 * list(range(40)))


REFUSED = {
    "cached batches": (ALL["cache_after_batch"], "cache in memory"),
    "several orders": (
        lambda: tunable_pipeline(
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


def test_a_pass_of_which_others_take_a_part_is_refused():
    (worker,) = make_workers(ELEMENT["map"], (1,), [[1]])
    worker._last = ClaimedPass(None, GroupClaims(()), 1, 0)
    assert "async workers" in worker.tuning.refusal()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda knobs: whole_batches(knobs).unbatch().batch(4 + knobs.threads), "batch size"),
        (
            lambda knobs: (slices if knobs == FIRST else samples)(knobs),
            "another kind of pipeline",
        ),
    ],
)
def test_builders_of_something_else_are_refused(change, reason, executor):
    (worker,) = make_workers(lambda: tunable_pipeline(change, FIRST), (1,), [[1]])
    iterator = iter(worker)
    next(iterator)
    with pytest.raises(HandoverError, match=reason):
        in_effect(worker.tuning.prepare(Knobs(3, 2, 4), executor))
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
