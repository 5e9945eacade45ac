"""Files to workers, and shares of steps from own files."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keras_het.planning.shares import apportion, assign_files, shares_of_own_samples

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@given(sizes=st.lists(st.integers(0, 100), max_size=30), weights=WEIGHTS)
def test_every_file_once_and_within_the_bound(sizes, weights):
    files = assign_files(sizes, weights)
    assert sorted(file for own in files for file in own) == list(range(len(sizes)))
    largest = max(sizes, default=0)
    for worker, own in enumerate(files):
        samples = sum(sizes[file] for file in own)
        ideal = sum(sizes) * weights[worker] / sum(weights)
        assert samples <= ideal + largest + 1e-9
        assert samples >= ideal - largest - 1e-9
        assert weights[worker] or not own


@given(
    total=st.integers(1, 50),
    cluster=st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
)
def test_shares_use_what_is_left_and_end_at_the_same_step(total, cluster):
    counts = [len(weights) for weights, _ in cluster]
    weights = [weight for weights, _ in cluster for weight in weights]
    assume(any(weights))
    remaining = [left for _, left in cluster]
    steps = 0
    expected_steps = -(-sum(remaining) // total)
    while any(remaining):
        shares = shares_of_own_samples(total, weights, counts, remaining)
        assert sum(shares) == min(total, sum(remaining))
        start = 0
        for worker, count in enumerate(counts):
            remaining[worker] -= sum(shares[start : start + count])
            assert remaining[worker] >= 0
            start += count
        steps += 1
    assert steps == expected_steps


def test_shares_follow_the_weights_while_all_have_samples():
    assert shares_of_own_samples(70, [4, 2, 1], [1, 2], [100, 100]) == apportion(70, [4, 2, 1])
    assert shares_of_own_samples(10, [1, 1], [1, 1], [2, 50]) == (2, 8)
    assert shares_of_own_samples(10, [1, 0], [1, 1], [4, 50]) == (4, 6)


def test_known_assignment():
    assert assign_files([10, 10, 10, 10, 10, 10, 10], [4, 2, 1]) == ((0, 1, 2, 4), (3, 5), (6,))


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="zero or more samples"):
        assign_files([1, -1], [1])
