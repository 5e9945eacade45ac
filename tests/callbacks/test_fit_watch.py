"""Who watches a `fit` learns that it is over, and not before."""

import threading
from types import SimpleNamespace

import pytest

from keras_het.callbacks import fit_watch
from keras_het.callbacks.fit_watch import FitWatch

PATIENCE = 60


class Model:
    """Has a `fit` that watches itself."""

    def __init__(self):
        self.ended = threading.Event()

    def fit(self, within=lambda: None):
        self.watch = FitWatch(self.ended.set, poll_seconds=0.01)
        within()


class OwnModel(Model):
    """Does something more after Keras's `fit`."""

    def fit(self, within=lambda: None):
        super().fit(within)
        assert self.ended.wait(PATIENCE)


@pytest.mark.parametrize("kind", [Model, OwnModel])
def test_a_fit_that_is_over_is_noticed(kind):
    model = kind()
    model.fit()
    assert model.ended.wait(PATIENCE)
    model.watch.stop()


def test_a_fit_that_failed_is_noticed_while_its_traceback_is_kept():
    def fail():
        raise ValueError("in a callback")

    model = Model()
    with pytest.raises(ValueError, match="in a callback") as kept:
        model.fit(fail)
    assert model.ended.wait(PATIENCE)
    assert kept.traceback


def test_a_fit_in_a_thread_that_has_ended_is_noticed():
    model = Model()
    thread = threading.Thread(target=model.fit)
    thread.start()
    thread.join()
    assert model.ended.wait(PATIENCE)


def test_a_fit_that_runs_is_none_that_is_over():
    """A `fit` within it ends meanwhile."""
    model, inner = Model(), Model()

    def run_another():
        inner.fit()
        assert inner.ended.wait(PATIENCE)
        assert not model.ended.is_set()
        model.watch.stop()

    model.fit(run_another)
    assert not model.ended.is_set() and not model.watch._thread.is_alive()


class LookedAtSeldom(Model):
    """The process may end before the next look."""

    def fit(self, within=lambda: None):
        self.watch = FitWatch(self.ended.set, poll_seconds=3600.0)
        within()


def test_a_process_that_ends_soon_after_a_fit_ends_what_ran_beside_it(monkeypatch):
    at_exit = []
    atexit = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(fit_watch, "atexit", atexit)
    model = LookedAtSeldom()
    model.fit()
    (function,) = at_exit
    function()
    assert model.ended.is_set() and not model.watch._thread.is_alive()
    model.watch.stop()
    assert not at_exit


def test_a_process_that_ends_within_a_fit_of_another_thread_ends_nothing(monkeypatch):
    at_exit = []
    atexit = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr(fit_watch, "atexit", atexit)
    model = LookedAtSeldom()
    model.fit(lambda: at_exit[0]())
    assert not model.ended.is_set() and not model.watch._thread.is_alive()
    model.watch.stop()


def test_without_a_fit_nothing_is_watched():
    watch = FitWatch(lambda: pytest.fail("nothing has ended"))
    assert watch._thread.ident is None
    watch.stop()
