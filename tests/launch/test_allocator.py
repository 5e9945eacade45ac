"""What `keras-het serve` asks of the C library, seen in that library's own statistics."""

import os
import subprocess
import sys

import pytest

from keras_het.launch.serve_command import share_freed_memory

PROGRAM = """
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
        [sys.executable, "-c", PROGRAM.format(shares=shares)],
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
