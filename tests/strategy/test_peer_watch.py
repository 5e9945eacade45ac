"""Who is lost is found by asking, and told once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from keras_het.strategy.peer_watch import PeerWatch, WorkerLostError, name_lost_workers

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
    is_healthy: Callable[[str, float], bool] = lambda task, timeout: True,
    abort: Callable[[str], None] = lambda message: None,
    **options: float,
) -> PeerWatch:
    return PeerWatch(PEERS, is_healthy, abort, **{"interval_seconds": 0.001, **options})


def test_nobody_is_lost() -> None:
    watch = make_watch()
    assert watch.check() is None
    assert watch.check() is None


def test_a_worker_is_lost_when_it_misses_two_rounds_in_a_row() -> None:
    answers = iter([False, True, False, False])
    watch = make_watch(lambda task, timeout: next(answers) if task == SECOND else True)
    assert [watch.check() for _ in range(3)] == [None, None, None]
    message = watch.check()
    assert message is not None
    assert message.startswith("Lost worker 1 (host-c:3): it no longer answers")
    assert "host-a" not in message
    assert "host-b" not in message


def test_all_lost_workers_are_named() -> None:
    watch = make_watch(lambda task, timeout: task == FIRST, num_failures=1)
    message = watch.check()
    assert message is not None
    assert message.startswith("Lost chief 0 (host-a:1), worker 1 (host-c:3): ")


def test_peers_that_hang_share_one_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    patience: list[float] = []

    def hang(task: str, timeout: float) -> bool:
        patience.append(timeout)
        now[0] += timeout
        return False

    monkeypatch.setattr("keras_het.strategy.peer_watch.time.monotonic", lambda: now[0])
    watch = make_watch(hang, timeout_seconds=4.0)
    watch.check()
    assert patience == [4.0, 0.5, 0.5]


def test_the_watch_aborts_collectives_once_and_ends() -> None:
    aborted: list[str] = []
    done = threading.Event()

    def abort(message: str) -> None:
        aborted.append(message)
        done.set()

    watch = make_watch(lambda task, timeout: task != FIRST, abort)
    watch.start()
    assert done.wait(TIMEOUT)
    assert watch.wait_for_loss(TIMEOUT) == aborted[0]
    watch._thread.join(TIMEOUT)
    assert not watch._thread.is_alive()
    assert len(aborted) == 1
    assert aborted[0].startswith("Lost worker 0 (host-b:2)")


def test_a_stopped_watch_asks_no_more() -> None:
    asked = threading.Event()

    def is_healthy(task: str, timeout: float) -> bool:
        asked.set()
        return True

    watch = make_watch(is_healthy)
    watch.start()
    assert asked.wait(TIMEOUT)
    watch.stop()
    watch._thread.join(TIMEOUT)
    assert not watch._thread.is_alive()
    assert watch.wait_for_loss(0.0) is None


def test_the_thread_does_not_keep_the_process_alive() -> None:
    assert make_watch()._thread.daemon


def test_a_broken_connection_becomes_one_error_that_names_the_worker() -> None:
    watch = make_watch(lambda task, timeout: task != SECOND)

    def step(value: int) -> None:
        raise UnavailableError("failed to connect to all addresses")

    watch.start()
    with pytest.raises(WorkerLostError, match=r"^Lost worker 1 \(host-c:3\)") as raised:
        name_lost_workers(watch, step)(1)
    assert raised.value.__suppress_context__


def test_other_errors_pass_unchanged() -> None:
    watch = make_watch(lambda task, timeout: False)

    def step() -> None:
        raise ZeroDivisionError("a mistake of the user")

    with pytest.raises(ZeroDivisionError, match="a mistake of the user"):
        name_lost_workers(watch, step)()


def test_an_error_while_all_workers_answer_passes_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = make_watch()
    monkeypatch.setattr(watch, "wait_for_loss", lambda timeout_seconds: None)

    def step() -> None:
        raise UnavailableError("another server that the data come from")

    with pytest.raises(UnavailableError, match="another server"):
        name_lost_workers(watch, step)()


def test_results_and_arguments_pass() -> None:
    step = name_lost_workers(make_watch(), lambda *args, **kwargs: (args, kwargs))
    assert step(1, 2, key=3) == ((1, 2), {"key": 3})
    assert step.names_lost_workers  # type: ignore[attr-defined]
