"""Division of reading threads, against brute force."""

import itertools

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.planning.loader import allocate_readers


def value(needs, parts):
    """Sum of r f(n / r), f(u) = (u^-4 + 1)^(-1/4)."""
    return sum(
        need * ((part / need) ** -4 + 1.0) ** -0.25 for need, part in zip(needs, parts, strict=True)
    )


@examples(150)
@given(needs=st.lists(st.floats(0.1, 40.0), min_size=1, max_size=3), threads=st.integers(3, 14))
def test_division_is_as_good_as_the_best_of_all(needs, threads):
    found = allocate_readers(needs, threads)
    choices = itertools.product(range(1, threads + 1), repeat=len(needs))
    best = max(value(needs, choice) for choice in choices if sum(choice) <= threads)
    assert min(found) >= 1
    assert sum(found) <= threads
    assert value(needs, found) >= best - 1e-9 * best


@pytest.mark.parametrize(
    ("needs", "threads", "parts"),
    [
        ([8.0, 8.0], 8, (4, 4)),
        ([40.0, 10.0], 10, (8, 2)),
        # far beyond what there is, and far below
        ([6400.0, 1600.0], 10, (8, 2)),
        ([40.0, 0.1], 10, (9, 1)),
        ([5.0], 7, (7,)),
        ([9.0, 9.0, 9.0], 2, (1, 1, 1)),
        ([], 4, ()),
    ],
)
def test_devices_get_threads_by_what_they_need(needs, threads, parts):
    assert allocate_readers(needs, threads) == parts


@pytest.mark.parametrize(("needs", "threads"), [([1.0], 0), ([0.0], 4), ([float("nan")], 4)])
def test_nothing_to_divide_is_refused(needs, threads):
    with pytest.raises(ValueError, match="There must be threads"):
        allocate_readers(needs, threads)
