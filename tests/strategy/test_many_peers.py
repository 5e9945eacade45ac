"""Sixty-four workers that watch each other: few messages each, and all hear of a loss."""

import socket
import threading
from collections import Counter

import pytest

from keras_het.strategy.cluster.arrival import has_left
from keras_het.strategy.cluster.peer_watch import PeerWatch, neighbours

NUMBER = 64
TIMEOUT = 30.0


class Worker:
    """A stand-in for a worker: a real watch, and answers from a table."""

    def __init__(self, cluster, place):
        self.place = place
        self.aborted_by = []
        self.aborts = threading.Event()
        self.watch = PeerWatch(
            {cluster.task(other): f"host:{other}" for other in neighbours(place, NUMBER)},
            cluster.ask,
            self.abort,
            patience_seconds=0.5,
            has_left=lambda address: int(address.split(":")[1]) in cluster.dead,
            interval_seconds=0.1,
        )
        self.watch.share_news(cluster.tell, cluster.wait_for_news)

    def abort(self, message):
        self.aborted_by.append(message)
        self.aborts.set()


class Cluster:
    """Its worker 0 keeps the news, as that of TensorFlow does."""

    def __init__(self):
        self.dead = set()
        self.silent = set()
        self.news = None
        self.has_news = threading.Event()
        self.workers = [Worker(self, place) for place in range(NUMBER)]

    def tell(self, message):
        if 0 not in self.dead | self.silent and self.news is None:
            self.news = message
            self.has_news.set()

    def wait_for_news(self):
        self.has_news.wait()
        return self.news

    @staticmethod
    def task(place):
        return f"/job:worker/replica:0/task:{place}"

    def ask(self, task, timeout):
        place = int(task.rsplit(":", 1)[1])
        return place not in self.dead | self.silent

    def start(self):
        for worker in self.workers:
            worker.watch.start()

    def lose(self, place, kind):
        lost = self.workers[place]
        lost.watch.stop()
        getattr(self, kind).add(place)


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.has_news.set()  # ends those that wait for it
    for worker in made.workers:
        worker.watch.stop()
    for worker in made.workers:
        if worker.watch._thread.ident is not None:
            worker.watch._thread.join(TIMEOUT)


@pytest.mark.quick("37-dead", "0-silent")
@pytest.mark.parametrize("kind", ["dead", "silent"])
@pytest.mark.parametrize("place", [0, 37])
def test_everybody_hears_who_was_lost(cluster, place, kind):
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


@pytest.mark.parametrize("number", [2, 3, 4, 5, 64, 1000])
def test_everybody_is_watched_by_three_and_the_first_by_all(number):
    watched = {place: neighbours(place, number) for place in range(number)}
    assert all(place not in others for place, others in watched.items())
    by = Counter(other for others in watched.values() for other in others)
    assert by[0] == number - 1
    assert {by[place] for place in range(1, number)} == {min(3, number - 1)}


def test_who_listened_at_a_port_that_refuses_has_left():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not has_left(address)
    assert has_left(address)
    assert not has_left("a.host.that.does.not.exist.invalid:80")
