"""Processes end while calls wait, and the death of one is noticed by the others."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from services import TIMEOUT, Twice, connected, contribution, serving, wait_until

PROGRAM = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from services import *

role, address = sys.argv[2:]
service = Twice()
if role == "serves itself":
    server = Server("127.0.0.1:0")
    server.serve("twice", CREDENTIAL, service.handle)
    server.start()
    address = server.address
client = Client(address, "twice", CREDENTIAL)
client.connect(30.0)
waiting = client.send(contribution(0, [1.0]))
assert role != "serves itself" or service.has_waiting.wait(30.0)
threading.Thread(target=waiting.result, daemon=True).start()
print("waits", flush=True)
if role == "stays":
    sys.stdin.read()
"""


def start(role, address="none"):
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), role, address]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("role", ["serves itself", "asks"])
def test_a_process_ends_while_a_call_waits(role):
    with serving(Twice().handle) as server, start(role, server.address) as process:
        try:
            _, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == 0, errors[-2000:]


def test_a_client_that_is_killed_leaves_nothing():
    service = Twice()
    with serving(service.handle) as server, connected(server) as other:
        process = start("stays", server.address)
        with process:
            try:
                assert process.stdout.readline() == "waits\n"
                waiting = other.send(contribution(0, [1.0]))
                wait_until(lambda: len(service.waiting) == 2 and server.budget.held == 8)
                process.send_signal(signal.SIGKILL)
                wait_until(lambda: server.budget.held == 4)
            finally:
                process.kill()
        assert not waiting.done()
