"""Sixty-four workers that watch each other: few messages each, and all hear of a loss."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from keras_het.strategy.cluster_address import refuses_connections
from keras_het.strategy.neighbours import neighbours
from keras_het.strategy.peer_news import PeerNews, new_token
from keras_het.strategy.peer_watch import PeerWatch

NUMBER = 64
TIMEOUT = 30.0


class Worker:
    """A stand-in for a worker: a real watch with real news, and answers from a table."""

    def __init__(self, cluster: Cluster, place: int) -> None:
        self.place = place
        self.aborted_by: list[str] = []
        self.aborts = threading.Event()
        self.news = PeerNews("127.0.0.1:1")
        self.watch = PeerWatch(
            {cluster.task(other): f"host:{other}" for other in neighbours(place, NUMBER)},
            cluster.ask,
            self.abort,
            patience_seconds=0.5,
            refuses=lambda address: int(address.split(":")[1]) in cluster.dead,
            interval_seconds=0.1,
        )

    def abort(self, message: str) -> None:
        self.aborted_by.append(message)
        self.aborts.set()


class Cluster:
    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.dead: set[int] = set()
        self.silent: set[int] = set()
        self.workers = [Worker(self, place) for place in range(NUMBER)]
        token = new_token()
        for worker in self.workers:
            told = [
                f"127.0.0.1:{self.workers[other].news.port}"
                for other in range(NUMBER)
                if other in neighbours(worker.place, NUMBER)
                or worker.place in neighbours(other, NUMBER)
            ]
            worker.watch.tell = worker.news.tell
            worker.news.start(token, told, worker.watch.hear)

    @staticmethod
    def task(place: int) -> str:
        return f"/job:worker/replica:0/task:{place}"

    def ask(self, task: str, timeout: float) -> bool:
        place = int(task.rsplit(":", 1)[1])
        self.asked[task] += 1
        return place not in self.dead | self.silent

    def start(self) -> None:
        for worker in self.workers:
            worker.watch.start()

    def lose(self, place: int, kind: str) -> None:
        lost = self.workers[place]
        lost.watch.stop()
        lost.news.close()
        getattr(self, kind).add(place)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for worker in made.workers:
        worker.watch.stop()
        worker.news.close()
    for worker in made.workers:
        if worker.watch._thread.ident is not None:
            worker.watch._thread.join(TIMEOUT)


@pytest.mark.quick("37-dead", "0-silent")
@pytest.mark.parametrize("kind", ["dead", "silent"])
@pytest.mark.parametrize("place", [0, 37])
def test_everybody_hears_who_was_lost(cluster: Cluster, place: int, kind: str) -> None:
    cluster.start()
    cluster.lose(place, kind)
    for worker in cluster.workers:
        if worker.place != place:
            message = worker.watch.wait_for_loss(TIMEOUT)
            assert message is not None, worker.place
            assert message.startswith(f"Lost worker {place} (host:{place}): ")
            # in the thread that has found or heard it
            assert worker.aborts.wait(TIMEOUT), worker.place
            assert worker.aborted_by == [message]


def test_each_worker_asks_few_and_is_asked_by_few(cluster: Cluster) -> None:
    for worker in cluster.workers:
        worker.watch.check()
    assert set(cluster.asked) == {cluster.task(place) for place in range(NUMBER)}
    assert set(cluster.asked.values()) == {4}


@pytest.mark.parametrize("number", [2, 3, 5, 6, 64, 1000])
def test_news_reach_everybody_within_few_hops(number: int) -> None:
    for lost in {None, number // 2, 0} if number > 2 else {None}:
        heard, hops = {1}, 0
        while len(heard) < number - (lost is not None):
            more = {other for place in heard for other in neighbours(place, number)} - {lost}
            assert not more <= heard
            heard, hops = heard | more, hops + 1
        assert hops <= 25
    assert all(len(neighbours(place, number)) <= 4 for place in range(number))
    assert all(place not in neighbours(place, number) for place in range(number))


def test_who_does_not_know_the_token_is_not_heard() -> None:
    heard: list[str] = []
    done = threading.Event()

    def hear(message: str) -> None:
        heard.append(message)
        done.set()

    listener, stranger, friend = (PeerNews("127.0.0.1:1") for _ in range(3))
    token = new_token()
    listener.start(token, [], hear)
    address = f"127.0.0.1:{listener.port}"
    stranger.start(new_token(), [address], hear)
    friend.start(token, [address], hear)
    stranger._send(address, "a lie")
    stranger._send(address, "")
    friend._send(address, "the truth")
    assert done.wait(TIMEOUT)
    assert heard == ["the truth"]
    for news in (listener, stranger, friend):
        news.close()


def test_a_port_that_nobody_listens_at_refuses() -> None:
    news = PeerNews("127.0.0.1:1")
    address = f"127.0.0.1:{news.port}"
    assert not refuses_connections(address)
    news.close()
    assert refuses_connections(address)
    assert not refuses_connections("a.host.that.does.not.exist.invalid:80")
