"""Who is lost is found by asking, and told once."""

import itertools
import queue
import threading
from types import SimpleNamespace

import pytest

from keras_het.strategy.cluster import peer_watch
from keras_het.strategy.cluster.peer_watch import (
    PeerWatch,
    WorkerLostError,
    naming_lost_workers,
    read_peer_timeout,
)

PEERS = {
    "/job:chief/replica:0/task:0": "host-a:1",
    "/job:worker/replica:0/task:0": "host-b:2",
    "/job:worker/replica:0/task:1": "host-c:3",
}
CHIEF, FIRST, SECOND = PEERS
TIMEOUT = 20.0


class UnavailableError(Exception):
    """Named like TensorFlow's error about a broken connection."""


def make_watch(
    is_healthy=lambda task, timeout: True,
    abort=lambda message: None,
    **options,
):
    options = {"interval_seconds": 0.001, "has_left": lambda address: True, **options}
    return PeerWatch(PEERS, is_healthy, abort, **options)


def test_a_worker_that_refuses_connections_is_lost_in_the_second_round():
    answers = iter([False, True, False, False])
    watch = make_watch(lambda task, timeout: next(answers) if task == SECOND else True)
    assert [watch.check() for _ in range(3)] == [None, None, None]
    message = watch.check()
    assert message is not None
    assert message.startswith("Lost worker 1 (host-c:3): it no longer answers")
    assert "host-a" not in message
    assert "host-b" not in message


def test_a_worker_in_whose_place_is_another_process_is_lost_at_once():
    def ask(task, timeout):
        if task == FIRST:
            raise ProcessLookupError
        return True

    message = make_watch(ask).check()
    assert message is not None
    assert message.startswith("Lost worker 0 (host-b:2)")


@pytest.mark.parametrize("silent", [{FIRST}, set(PEERS)], ids=["one", "all"])
@pytest.mark.parametrize("connecting", [0.0, 1.0], ids=["stopped", "unplugged"])
def test_a_silent_worker_is_lost_when_patience_is_at_its_end(monkeypatch, silent, connecting):
    """However long it takes to ask: a connection to an unplugged machine is not even refused."""
    now = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ask(task, timeout):
        now[0] += timeout if task in silent else 0.0
        return task not in silent

    def has_left(address):
        now[0] += connecting
        return False

    watch = make_watch(ask, has_left=has_left, patience_seconds=30.0, interval_seconds=0.5)
    while (message := watch.check()) is None:
        now[0] += 0.5
    one_round = 0.5 + len(silent) * (0.25 + connecting)
    assert 130.0 <= now[0] <= 130.0 + 2 * one_round
    assert message.startswith("Lost")


@pytest.mark.parametrize("while_asking", [False, True])
def test_the_watchs_own_pause_is_not_the_silence_of_others(monkeypatch, while_asking):
    now = [100.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ask(task, timeout):
        now[0] += 60.0 if while_asking else 0.0
        return False

    watch = make_watch(ask, has_left=lambda address: False, interval_seconds=0.5)
    now[0] += 0.0 if while_asking else 1000.0
    assert watch.check() is None


def test_one_answer_ends_a_silence():
    answers = itertools.cycle([False, False, True])
    watch = make_watch(
        lambda task, timeout: next(answers) if task == FIRST else True,
        has_left=lambda address: False,
        patience_seconds=1.2,
        interval_seconds=0.5,
    )
    assert [watch.check() for _ in range(30)] == [None] * 30


def test_all_lost_workers_are_named():
    watch = make_watch(lambda task, timeout: task == FIRST)
    watch.check()
    message = watch.check()
    assert message is not None
    assert message.startswith("Lost chief 0 (host-a:1), worker 1 (host-c:3): ")


def test_the_first_news_abort():
    aborted = queue.Queue()
    watch = make_watch(abort=aborted.put)
    news = queue.Queue()
    for _ in range(3):
        watch.share_news(lambda message: None, news.get)
    for message in (None, "Lost worker 7"):  # of a worker 0 that is gone none come
        news.put(message)
    assert aborted.get(timeout=TIMEOUT) == "Lost worker 7"
    news.put("Lost worker 8")
    assert watch.wait_for_loss() == "Lost worker 7"
    assert aborted.empty()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_the_time_out_in_the_environment_is_checked(text, monkeypatch):
    monkeypatch.setenv("KERAS_HET_PEER_TIMEOUT_SECONDS", text)
    with pytest.raises(ValueError, match="KERAS_HET_PEER_TIMEOUT_SECONDS must be a number above 0"):
        read_peer_timeout(None)
    assert read_peer_timeout(7) == 7.0


def test_the_time_out_is_the_environments_or_half_a_minute(monkeypatch):
    monkeypatch.delenv("KERAS_HET_PEER_TIMEOUT_SECONDS", raising=False)
    assert read_peer_timeout(None) == 30.0
    monkeypatch.setenv("KERAS_HET_PEER_TIMEOUT_SECONDS", "2.5")
    assert read_peer_timeout(None) == 2.5


def test_what_is_found_aborts_collectives_and_is_reported_once():
    aborted = queue.Queue()
    told = queue.Queue()
    watch = make_watch(lambda task, timeout: task != FIRST, aborted.put)
    watch.share_news(told.put, lambda: None)
    watch.start()
    found = aborted.get(timeout=TIMEOUT)
    assert found.startswith("Lost worker 0 (host-b:2)")
    assert told.get(timeout=TIMEOUT) == watch.wait_for_loss(TIMEOUT) == found
    watch._thread.join(TIMEOUT)
    assert not watch._thread.is_alive()
    assert aborted.empty() and told.empty()


def test_a_stopped_watch_asks_no_more():
    asked = threading.Event()

    def is_healthy(task, timeout):
        asked.set()
        return True

    watch = make_watch(is_healthy)
    watch.start()
    assert asked.wait(TIMEOUT)
    watch.stop()
    watch._thread.join(TIMEOUT)
    assert not watch._thread.is_alive()
    assert watch.wait_for_loss(0.0) is None


def test_the_thread_does_not_keep_the_process_alive():
    assert make_watch()._thread.daemon


def test_a_broken_connection_becomes_one_error_that_names_the_worker():
    watch = make_watch(lambda task, timeout: task != SECOND)

    watch.start()
    with (
        pytest.raises(WorkerLostError, match=r"^Lost worker 1 \(host-c:3\)") as raised,
        naming_lost_workers(watch),
    ):
        raise UnavailableError("failed to connect to all addresses")
    assert raised.value.__suppress_context__


def test_other_errors_pass_unchanged():
    watch = make_watch(lambda task, timeout: False)

    with pytest.raises(ZeroDivisionError, match="of the user"), naming_lost_workers(watch):
        raise ZeroDivisionError("a mistake of the user")


def test_an_error_while_all_workers_answer_passes_unchanged(
    monkeypatch,
):
    watch = make_watch()
    monkeypatch.setattr(watch, "wait_for_loss", lambda: None)

    with pytest.raises(UnavailableError, match="another server"), naming_lost_workers(watch):
        raise UnavailableError("another server that the data come from")
