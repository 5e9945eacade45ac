"""`keras-het parameter-server`: its memory, its threads, and when it ends."""

import argparse
import json
import os
import socket
import subprocess
import sys

import pytest

from keras_het import rules
from keras_het.launch import serve_command
from keras_het.launch.command_line import main
from keras_het.launch.serve_command import share_freed_memory

MEMORY_PROGRAM = """
import ctypes, threading
from keras_het.launch.serve_command import share_freed_memory

if {shares}:
    print(share_freed_memory())
met = threading.Barrier(4)

def use_memory():
    first = ctypes.create_string_buffer(100_000)
    met.wait()

threads = [threading.Thread(target=use_memory) for _ in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
large = ctypes.create_string_buffer(20_000_000)
del large
ctypes.CDLL(None).malloc_stats()
"""


def run(shares, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM.format(shares=shares)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def statistics(done):
    kept = [int(line.split()[-1]) for line in done.stderr.splitlines() if "system bytes" in line]
    return done.stderr.count("Arena "), kept[-1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_threads_share_memory_and_freed_memory_is_kept():
    done = run(shares=True)
    num_places, kept_bytes = statistics(done)
    assert done.stdout == "True\n"
    assert num_places == 1
    assert kept_bytes > 20_000_000
    num_places, kept_bytes = statistics(run(shares=False))
    assert num_places > 1
    assert kept_bytes < 20_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_what_the_environment_says_stays():
    done = run(shares=True, MALLOC_ARENA_MAX="3")
    assert done.stdout == "False\n"
    assert statistics(done)[0] == 3


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not share_freed_memory()


def test_processes_that_serve_or_sum_load_neither_tensorflow_nor_keras():
    program = """
import sys
import keras_het.summation.machine
from keras_het.asynchronous.parameter_service.hosting import ServingProcess
from keras_het.rules import get
for rule in ("delta", "round_robin_easgd", "delayed_nesterov", "sync_easgd", "diloco"):
    get(rule, num_workers=2)
get({"class_name": "async_sgd", "config": {"learning_rate": 0.1}})
print(sorted({"tensorflow", "keras"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


def set_up(monkeypatch, address):
    cluster = {"worker": ["127.0.0.1:1"], "async": ["127.0.0.1:2"], "ps": [address]}
    task = {"type": "ps", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("KERAS_HET_SECRET", "0123456789abcdef")
    monkeypatch.delenv("KERAS_HET_SECRET_FILE", raising=False)
    monkeypatch.setattr(serve_command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve_command, "share_freed_memory", lambda: False)  # not for this process


@pytest.mark.parametrize(
    ("offers_left", "once", "served"),
    [
        ([False], True, 1),
        ([True, False], True, 2),  # the leader was restarted: its second offer was accepted
        ([False, True, False], False, 3),
    ],
)
def test_how_many_trainings_are_served(monkeypatch, offers_left, once, served):
    calls, closed = [], []

    class Process:
        def __init__(self, *given):
            pass

        def close(self):
            closed.append(1)

        def serve_one(self):
            calls.append(len(calls))
            return len(calls) <= len(offers_left)

        @property
        def is_offered_another(self):
            return offers_left[len(calls) - 1]

    set_up(monkeypatch, "127.0.0.1:3")
    monkeypatch.setattr("keras_het.asynchronous.parameter_service.hosting.ServingProcess", Process)
    assert serve_command.serve_parameters(argparse.Namespace(once=once, module=None)) == 0
    assert len(calls) == served + (not once)  # the last one says that it was told to end
    assert closed == [1]


def test_a_rule_of_ones_own_is_imported(monkeypatch, capsys, tmp_path):
    from service_doubles import service_spec  # which takes TensorFlow along

    made = []

    class Process:
        def __init__(self, *given):
            pass

        def close(self):
            pass

        def serve_one(self):
            half = {"class_name": "half_delta", "config": {}}
            made.extend(service_spec(rule=half).make_rules())
            return False

    set_up(monkeypatch, "127.0.0.1:3")
    monkeypatch.setattr("keras_het.asynchronous.parameter_service.hosting.ServingProcess", Process)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(rules.registry, "RULES", rules.RULES.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half_rules.py").write_text(
        "from keras_het.rules import Delta, register_rule\n\n"
        "@register_rule\nclass Half(Delta):\n    name = 'half_delta'\n"
    )
    assert main(["parameter-server", "--import", "half_rules.py"]) == 2
    assert "Received: 'half_rules.py'" in capsys.readouterr().err
    assert main(["parameter-server", "--import", "half_rules"]) == 0
    assert [type(rule).__name__ for rule in made] == ["Half", "Delta"]


def test_a_port_that_is_taken_is_one_line_of_error(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        set_up(monkeypatch, address)
        assert main(["parameter-server"]) == 2
    message = capsys.readouterr().err
    assert f"[keras-het] error: The server at {address} did not start" in message
