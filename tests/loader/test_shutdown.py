"""Iterators that are left early never block: not their destruction, not the process's end."""

import contextlib
import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import tensorflow as tf
from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

def dataset(lookahead=2, samples=1000, mapped=True):
    source = tf.data.Dataset.range(samples).shuffle(50, seed=1)
    if mapped:
        source = source.map(lambda i: i + 1, num_parallel_calls=tf.data.AUTOTUNE)
    source = source.batch(4).prefetch(tf.data.AUTOTUNE)
    return GlobalOrderDataset(source, ReplicaLayout((1, 1), 0), lambda: [3, 1],
                              lambda batches, sizes: sizes, lookahead=lookahead)
"""

PROGRAMS = {
    "left at the end of the program": """
        iterators = []
        for options in ({}, {"lookahead": 0, "mapped": False}, {"samples": 7}):
            iterators.append(iter(dataset(**options)))
            next(iterators[-1])
        """,
    "left on the way": """
        import gc

        for _ in dataset():
            break

        held = []
        for index in range(3):
            iterator = iter(dataset(lookahead=index, mapped=index != 1))
            next(iterator), next(iterator)
            held.append(iterator)
        del held

        source = dataset()
        for _ in range(3):
            iterator = iter(source)
            next(iterator), next(iterator)
        iterator.close()
        iterator.close()
        assert next(iterator, "end") == "end"

        class Cycle: pass
        for _ in range(3):
            cycle = Cycle()
            cycle.itself, cycle.source = cycle, dataset()
            cycle.iterator = iter(cycle.source)
            next(cycle.iterator), next(cycle.iterator)
            del cycle
            gc.collect()
        """,
    "left by an exit": """
        import sys
        for _ in dataset():
            print("END")
            sys.exit(0)
        """,
}


def run(program, timeout=240):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program) + "\nprint('END')"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_process_ends(name):
    result = run(PROGRAMS[name])
    assert result.returncode == 0, result.stderr
    assert "END" in result.stdout
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


LATE = """
        import threading
        import time
        from keras_het.loader import iterator_adapter
        from keras_het.loader.iterators.handover import HeldIterator
        from keras_het.loader.iterators.handover import release

        def late(*arguments):
            threading.main_thread().join()  # the interpreter has begun to end
            queue = tf.queue.FIFOQueue(9, [tf.float64], [[2]])
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                queue.enqueue([[1.0, 2.0]])
                queue.dequeue_many(int(queue.size()))
            print("LET GO", flush=True)
        """
RELEASES = {
    "of a pass": """
        HeldIterator(tf.data.Dataset.range(3)).release(late)
        """,
    "of a loader that is tuned": """
        iterator_adapter.restart_iterator = late
        release(iter(tf.data.Dataset.range(3)))
        """,
}


@pytest.mark.full
@pytest.mark.parametrize("name", RELEASES)
def test_the_process_ends_after_the_iterators_that_were_let_go(name):
    """Else it may be ended by a thread that comes back from TensorFlow (SIGABRT)."""
    result = run(textwrap.dedent(LATE) + textwrap.dedent(RELEASES[name]))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["END", "LET GO"]
    assert "Traceback" not in result.stderr


ERRORS = {"KeyboardInterrupt()": -signal.SIGINT, "ValueError('a mistake')": 1}


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_does_not_wait_for_an_iterator_that_takes_long_to_end(error):
    program = f"""
        import threading
        from keras_het.loader.iterators.handover import HeldIterator

        def late():
            threading.Event().wait(60)
            print("LET GO", flush=True)

        HeldIterator(tf.data.Dataset.range(3)).release(late)
        raise {error}
        """
    result = run(program)
    assert result.returncode == ERRORS[error], result.stderr
    assert result.stderr.strip().endswith(error.partition("(")[0]) or "a mistake" in result.stderr
    assert "LET GO" not in result.stdout


def interrupt_until_it_ends(process):
    """Presses Ctrl-C again when nothing happens; returns what the process wrote to stderr.

    Python's handler only notes the signal. When the note is looked at within an operation of
    TensorFlow the exception may be lost there (3 of about 60 times), and the loop continues.
    """
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)[1]
    raise TimeoutError("The process did not end.")


@pytest.mark.full
def test_interrupt_in_the_middle_of_an_epoch_ends_the_process():
    program = """
        source = dataset(samples=10**9)
        for step, _ in enumerate(source):
            if step == 5:
                print("READY", flush=True)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "READY"
        errors = interrupt_until_it_ends(process)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (-signal.SIGINT, 1, 130)
