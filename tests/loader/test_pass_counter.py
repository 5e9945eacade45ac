"""Passes are numbered when their iterator is made, and unused ones are let go by."""

from keras_het.loader.order.pass_counter import PassCounter


def test_an_epoch_of_keras():
    passes = PassCounter()
    look = passes.reserve()
    assert passes.start(look) == 0
    passes.give_back(look)
    first = passes.reserve()  # the same pass as the look: it is not started again
    assert first == look
    assert passes.reserve() == 1  # Keras does not use this one
    assert passes.before(None) == (True, False)
    second = passes.reserve()
    assert passes.start(second) == 2
    assert passes.gone_by == [True, False, True]
    assert passes.before(second) == (True, False)


def test_only_the_latest_number_is_given_back():
    passes = PassCounter()
    first, _ = passes.reserve(), passes.reserve()
    passes.give_back(first)
    assert passes.reserve() == 2


def test_iterators_that_start_in_another_order():
    passes = PassCounter()
    first, second = passes.reserve(), passes.reserve()
    assert passes.start(second) == 1
    assert passes.start(first) == 2  # its own order is gone: it takes the next
    assert passes.gone_by == [False, True, True]
    assert passes.reserve() == 3


def test_going_back():
    passes = PassCounter()
    passes.start(passes.reserve())
    passes.set_to((True, False, True))
    assert passes.before(None) == (True, False, True)
    assert passes.start(passes.reserve()) == 3
    assert passes.before(3) == (True, False, True)


def test_passes_that_have_not_ended():
    passes = PassCounter()
    first, second = passes.start(passes.reserve()), passes.start(passes.reserve())
    assert passes.unfinished == {first, second}
    passes.finish(first)
    assert passes.unfinished == {second}
    passes.set_to((True, True))
    assert not passes.unfinished


class Shuffle:
    """Stands for a node of a pipeline, of which there are copies."""


def test_copies_of_a_shuffle_let_the_passes_of_each_other_go_by():
    passes = PassCounter()
    train, validation = Shuffle(), Shuffle()
    assert passes.catch_up(train, passes.start(passes.reserve())) == []
    passes.finish(0)
    passes.reserve()  # Keras does not use this one
    assert passes.catch_up(validation, passes.start(passes.reserve())) == [True, False]
    passes.leave(2, 7)
    assert passes.catch_up(train, passes.start(passes.reserve())) == [False, 7]
    assert passes.before(None) == (True, False, 7, True)
    copy = Shuffle()
    passes.set_to((True, 7))
    passes.is_at(copy, 2)
    assert passes.catch_up(copy, passes.start(passes.reserve())) == []
    assert passes.catch_up(Shuffle(), 2) == [True, 7]


def test_only_a_pass_that_has_not_ended_is_left():
    passes = PassCounter()
    number = passes.start(passes.reserve())
    passes.finish(number)
    passes.leave(number, 7)
    assert passes.gone_by == [True]
