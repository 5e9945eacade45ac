"""Pipelines end in separate threads: ending one may take seconds, and training continues."""

import threading

import pytest
from loader_training import dense, numbered

from keras_het.callbacks import LoaderTuner
from keras_het.loader import Knobs, iterator_adapter, tunable_pipeline
from keras_het.loader.iterators.handover import HeldIterator, release
from keras_het.loader.iterators.live_iterator import LiveIterator

TIMEOUT = 30
build = numbered(40)


class Ends:
    """Keeps where iterators end, and lets none of them end before it may."""

    def __init__(self, end):
        self._end = end
        self._news = threading.Condition()
        self.threads, self.ended = [], 0
        self.may_end = threading.Event()

    def __call__(self, *arguments):
        with self._news:
            self.threads.append(threading.current_thread())
            self._news.notify_all()
        if threading.current_thread() is not threading.main_thread():
            self.may_end.wait(TIMEOUT)
        self._end(*arguments)
        self.ended += 1

    def wait_for(self, count):
        with self._news:
            assert self._news.wait_for(lambda: len(self.threads) >= count, TIMEOUT)
        return self.threads


@pytest.fixture
def ends(monkeypatch):
    ends = Ends(iterator_adapter.restart_iterator)
    monkeypatch.setattr(iterator_adapter, "restart_iterator", ends)
    yield ends
    ends.may_end.set()


def test_who_lets_go_does_not_wait(ends):
    live = LiveIterator(iter(tunable_pipeline(build, Knobs(2, 2, 2))))
    live.take(3)
    live.release()
    assert ends.ended == 0, "the end was waited for"
    with pytest.raises(StopIteration):
        live.take(1)
    (thread,) = ends.wait_for(1)
    assert thread is not threading.main_thread()
    assert thread.daemon, "a process that ends waits for none"


def test_each_has_a_thread_of_its_own(ends):
    iterators = [iter(build(Knobs(2, 2, 2))) for _ in range(3)]
    events = [release(iterator) for iterator in iterators]
    assert len(set(ends.wait_for(3))) == 3
    assert not any(event.is_set() for event in events)
    ends.may_end.set()
    assert all(event.wait(TIMEOUT) for event in events)
    assert [list(iterator) for iterator in iterators] == [[], [], []]


@pytest.mark.parametrize("is_built", [True, False])
def test_epochs_begin_while_the_iterators_of_those_before_still_end(is_built, ends):
    tuner = LoaderTuner("fixed", cooperate_with_other_jobs=False)
    data = tunable_pipeline(build, Knobs(2, 2, 2)) if is_built else build(Knobs(2, 2, 2))
    dense().fit(data, epochs=3, verbose=0, callbacks=[tuner])
    assert ends.ended == 0, "an end was waited for"
    assert tuner.train_input_wait.steps == 3 * 10
    threads = ends.wait_for(3)  # one for each epoch, none of which has ended
    assert threading.main_thread() not in threads


def test_the_passes_of_a_strategy_end_elsewhere_too():
    done, threads = threading.Event(), []

    def after():
        threads.append(threading.current_thread())
        done.set()

    HeldIterator(build(Knobs(2, 2, 2))).release(after)
    assert done.wait(TIMEOUT)
    assert threads[0] is not threading.main_thread()
