"""Iterators that are left early never block: not their destruction, not the process's end."""

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
        iterator = iter(dataset())
        next(iterator)
        """,
    "left in a loop": """
        for _ in dataset():
            break
        """,
    "waiting for an order without lookahead": """
        iterator = iter(dataset(lookahead=0, mapped=False))
        next(iterator)
        """,
    "uneven last batch needs Python": """
        iterator = iter(dataset(samples=7))
        next(iterator)
        """,
    "many abandoned": """
        held = []
        for index in range(12):
            source = dataset(lookahead=index % 3, mapped=index % 2 == 0)
            iterator = iter(source)
            next(iterator), next(iterator)
            held.append(iterator)
        del held
        import gc; gc.collect()
        """,
    "many from one": """
        source = dataset()
        for _ in range(30):
            iterator = iter(source)
            next(iterator), next(iterator)
        assert source.pipelines_built <= 31
        """,
    "closed by hand": """
        iterator = iter(dataset())
        next(iterator)
        iterator.close()
        iterator.close()
        assert next(iterator, "end") == "end"
        """,
    "garbage in a cycle": """
        import gc
        class Cycle: pass
        for _ in range(8):
            cycle = Cycle()
            cycle.itself, cycle.source = cycle, dataset()
            cycle.iterator = iter(cycle.source)
            next(cycle.iterator), next(cycle.iterator)
            del cycle
            gc.collect()
        """,
    "an error in the middle": """
        for _ in dataset():
            try:
                raise ValueError("step failed")
            except ValueError:
                break
        import sys; sys.exit(0)
        """,
}


def run(program, timeout=90):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program) + "\nprint('END')"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_process_ends(name):
    result = run(PROGRAMS[name])
    assert result.returncode == 0, result.stderr
    assert "END" in result.stdout or "sys.exit" in PROGRAMS[name]
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


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
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (-signal.SIGINT, 1, 130)
