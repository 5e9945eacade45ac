"""Keras's warning is kept quiet for as long as one callback expects shorter epochs."""

import warnings

import pytest

from keras_het.fit.session import ShorterEpochs


def warns():
    """Whether Keras's warning comes through, among others that always do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("Your input ran out of data; interrupting training.", stacklevel=1)
        warnings.warn("Something else", stacklevel=1)
    messages = [str(each.message) for each in caught]
    assert "Something else" in messages
    return len(messages) == 2


@pytest.fixture(autouse=True)
def everything_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_one_to_end_lets_it_through(order):
    both = [ShorterEpochs(), ShorterEpochs()]
    before = list(warnings.filters)
    assert warns()
    for each in both:
        each.expect()
        assert not warns()
    assert both[order[0]].end()
    assert not warns()
    assert both[order[1]].end()
    assert warns()
    assert list(warnings.filters) == before


def test_to_expect_twice_is_to_expect_once():
    epochs = ShorterEpochs()
    epochs.expect()
    epochs.expect()
    assert epochs.end() and not epochs.end()
    assert warns()
