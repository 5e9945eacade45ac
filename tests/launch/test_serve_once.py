"""`keras-het serve --once` ends after a training, not after an offer of one that was made again."""

import argparse
import json
import socket

import pytest

from keras_het.launch import serve_command
from keras_het.launch.command_line import main


def set_up(monkeypatch, address):
    cluster = {"worker": ["127.0.0.1:1"], "async": ["127.0.0.1:2"], "ps": [address]}
    task = {"type": "ps", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "0123456789abcdef")
    monkeypatch.delenv("KERAS_HET_SERVICE_SECRET_FILE", raising=False)
    monkeypatch.setattr(serve_command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve_command, "share_freed_memory", lambda: False)  # not for this process
    prepared = []  # likewise
    threads = "keras_het.launch.serve_command.compute_without_splitting"
    monkeypatch.setattr(threads, lambda: prepared.append(1))
    return prepared


@pytest.mark.parametrize(
    ("offers_left", "once", "served"),
    [
        ([False], True, 1),
        ([True, False], True, 2),  # the leader was restarted: its second offer was accepted
        ([False, True, False], False, 3),
    ],
)
def test_how_many_trainings_are_served(monkeypatch, offers_left, once, served):
    calls = []

    class Process:
        def __init__(self, *given):
            pass

        def serve_one(self):
            calls.append(len(calls))
            return len(calls) <= len(offers_left)

        @property
        def is_offered_another(self):
            return offers_left[len(calls) - 1]

    prepared = set_up(monkeypatch, "127.0.0.1:3")
    monkeypatch.setattr("keras_het.asynchronous.exchange.hosting.ServingProcess", Process)
    assert serve_command.serve_parameters(argparse.Namespace(once=once)) == 0
    assert len(calls) == served + (not once)  # the last one says that it was told to end
    assert len(prepared) == 1


def test_a_port_that_is_taken_is_one_line_of_error(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        set_up(monkeypatch, address)
        assert main(["serve"]) == 2
    message = capsys.readouterr().err
    assert f"[keras-het] error: The server at {address} did not start" in message
