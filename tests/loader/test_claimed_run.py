"""Passes of which several groups each take their own batches."""

import numpy as np
import pytest
import tensorflow as tf

from keras_het.asynchronous.exchange.claims import AsyncClaims, Grant, GroupClaims
from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

ROWS, BATCH = 50, 8
NUM_BATCHES = 7


def shuffled(mapped):
    data = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=5)
    data = data.map(lambda v: v * 1) if mapped else data
    return data.batch(BATCH)


def distributed(source, claims, replicas=2, shares=(3, 1)):
    return GlobalOrderDataset(
        source,
        ReplicaLayout((replicas,), 0),
        lambda: shares,
        lambda local, sizes: (local, sizes),
        claims=claims if callable(claims) else lambda dataset: claims,
    )


def steps_of(dataset):
    return [
        (np.concatenate([part.numpy() for part in local]), sizes.tolist())
        for local, sizes in dataset
    ]


def group_claims(*ranges, pass_number=0):
    claims = GroupClaims((True,) * pass_number)
    for first, count, asked in ranges:
        claims.add(Grant(first, count, count < asked))
    return claims


@pytest.mark.parametrize("mapped", [False, True], ids=["cut", "mapped"])
def test_a_group_gets_its_batches_and_no_others(mapped):
    expected = [batch.numpy() for batch in shuffled(mapped)]
    claims = group_claims((0, 2, 2), (4, 1, 1), (6, 1, 2))
    steps = steps_of(distributed(shuffled(mapped), claims))
    assert len(steps) == 4
    for (rows, sizes), number in zip(steps, (0, 1, 4, 6), strict=True):
        np.testing.assert_array_equal(rows, expected[number])
        assert sizes == ([6, 2] if number < 6 else [2, 0])


@pytest.mark.parametrize("mapped", [False, True], ids=["cut", "mapped"])
def test_an_async_worker_claims_one_by_one_and_cuts_them_into_parts(mapped):
    expected = [batch.numpy() for batch in shuffled(mapped)]
    numbers = iter([1, 2, 6])
    claims = AsyncClaims((), 3, lambda: next(numbers, None))
    steps = steps_of(distributed(shuffled(mapped), claims, replicas=1, shares=(1,)))
    rows = np.concatenate([rows for rows, _ in steps])
    np.testing.assert_array_equal(rows, np.concatenate([expected[i] for i in (1, 2, 6)]))
    # 8 rows in three parts, 2 rows in two: an empty part is no step
    assert [sizes for _, sizes in steps] == [[3], [3], [2], [3], [3], [2], [1], [1]]
    assert claims.is_exhausted


def test_nothing_is_claimed_before_it_is_needed():
    claimed = []

    def claim():
        claimed.append(len(claimed))
        return claimed[-1]

    claims = AsyncClaims((), 1, claim)
    iterator = iter(distributed(shuffled(True), claims, replicas=1, shares=(1,)))
    for step in range(3):
        next(iterator)
        assert claimed == list(range(step + 1))
    iterator.close()


def test_passes_have_the_order_of_their_number():
    """Pass 2 is the third order of the shuffle, whoever iterates it and however often."""
    source = shuffled(True)
    orders = [np.concatenate([b.numpy() for b in source]) for _ in range(3)]
    everything = (0, NUM_BATCHES, NUM_BATCHES + 1)
    claims = [group_claims(everything, pass_number=number) for number in (0, 2, 2)]
    given = iter(claims)
    dataset = distributed(shuffled(True), lambda dataset: next(given), 1, (1,))
    for number in (0, 2, 2):
        rows = np.concatenate([rows for rows, _ in steps_of(dataset)])
        np.testing.assert_array_equal(rows, orders[number])


def test_group_claims_know_what_is_theirs():
    claims = GroupClaims(())
    assert not claims.is_known(0) and not claims.is_over(0)
    claims.add(Grant(2, 3, False))
    assert [claims.owns(batch) for batch in range(6)] == [False] * 2 + [True] * 3 + [False]
    assert claims.is_known(4) and not claims.is_known(5) and not claims.is_over(5)
    claims.add(Grant(9, 1, True))
    assert claims.is_known(50) and claims.is_over(10) and not claims.is_over(9)


@pytest.mark.parametrize("mapped", [False, True], ids=["cut", "mapped"])
def test_orders_continue_after_a_pass_without_own_batches(mapped):
    source = shuffled(mapped)
    orders = [[batch.numpy() for batch in source] for _ in range(3)]
    passes = iter([group_claims((0, 0, 1), pass_number=n) for n in range(2)])
    last = group_claims((0, NUM_BATCHES, NUM_BATCHES + 1), pass_number=2)
    dataset = distributed(shuffled(mapped), lambda dataset: next(passes, last), 2, (1, 1))
    assert steps_of(dataset) == [] and steps_of(dataset) == []
    for (rows, _), expected in zip(steps_of(dataset), orders[2], strict=True):
        np.testing.assert_array_equal(rows, expected)


def rows_of_epochs(source, gets_batches, validates):
    """Rows of each epoch as `fit` makes its passes; `gets_batches` says for which there are any."""
    nothing, everything = (0, 0, 1), (0, NUM_BATCHES, NUM_BATCHES + 1)
    now = []
    dataset = distributed(source, lambda dataset: now[-1])
    validation = distributed(source, None) if validates else []
    rows_of = {}
    for epoch, gets in gets_batches.items():
        claims = GroupClaims((True, False) * epoch)
        first, count, asked = everything if gets else nothing
        claims.add(Grant(first, count, count < asked))
        now.append(claims)
        rows_of[epoch] = [rows.tolist() for rows, _ in steps_of(dataset)]
        iter(dataset)  # Keras makes one at the end of an epoch that it does not use
        list(validation)
        iter(validation)
    return rows_of


@pytest.mark.quick("cut-one_shuffle-alone", "cut-two_shuffles-also_validation_data")
@pytest.mark.parametrize("validates", [False, True], ids=["alone", "also_validation_data"])
@pytest.mark.parametrize("nested", [False, True], ids=["one_shuffle", "two_shuffles"])
@pytest.mark.parametrize("mapped", [False, True], ids=["cut", "mapped"])
def test_orders_are_the_same_whatever_a_participant_did_before(mapped, nested, validates):
    def source():
        data = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=5)
        data = data.shuffle(4, seed=6) if nested else data
        data = data.map(lambda v: v * 1) if mapped else data
        return data.batch(BATCH)

    group = rows_of_epochs(source(), dict.fromkeys(range(5), True), validates)
    # got nothing of epoch 0 and nothing of epoch 2, and was late for epoch 3
    late = rows_of_epochs(source(), {0: False, 1: True, 2: False, 4: True}, validates)
    assert late[1] == group[1] and late[4] == group[4]
    assert len({str(epoch) for epoch in group.values()}) == 5 and late[0] == late[2] == []


def test_keras_need_not_ask_on_to_learn_that_the_last_batch_is_taken():
    numbers = iter(range(NUM_BATCHES))
    claims = AsyncClaims((), 1, lambda: next(numbers, None), NUM_BATCHES)
    iterator = iter(distributed(shuffled(True), claims, replicas=1, shares=(1,)))
    for _ in range(NUM_BATCHES):
        assert not claims.is_exhausted
        next(iterator)
    assert claims.is_exhausted and claims.is_over(NUM_BATCHES)
    with pytest.raises(tf.errors.OutOfRangeError):
        next(iter(iterator))  # as at the start of an execution


@pytest.mark.quick("cut-3")
@pytest.mark.parametrize("steps", [2, 3, 5])
@pytest.mark.parametrize("mapped", [False, True], ids=["cut", "mapped"])
def test_what_keras_leaves_of_a_batch_comes_with_its_next_epoch(mapped, steps):
    numbers = iter(range(NUM_BATCHES))
    claims = AsyncClaims((), 3, lambda: next(numbers, None), NUM_BATCHES)
    dataset = distributed(shuffled(mapped), lambda dataset: claims, replicas=1, shares=(1,))
    rows = []
    while not claims.is_exhausted or claims.left_over:
        iterator = iter(dataset)
        for _, (local, _) in zip(range(steps), iterator, strict=False):
            rows += local[0].numpy().tolist()
        iterator.close()
        left_over = claims.left_over
        if not claims.is_exhausted:
            claims = AsyncClaims((), 3, lambda: next(numbers, None), NUM_BATCHES, left_over)
        else:
            claims = AsyncClaims((), 3, lambda: None, NUM_BATCHES, left_over)
            claims.is_exhausted = True
    assert rows == [row for batch in shuffled(mapped) for row in batch.numpy()]


def test_a_pass_with_one_own_batch_is_not_one_of_one_batch():
    dataset = distributed(shuffled(True), group_claims((2, 1, 2)))
    assert len(steps_of(dataset)) == 1
    assert len(dataset) == NUM_BATCHES
