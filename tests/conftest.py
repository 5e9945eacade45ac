"""What every test relies on: the process's settings, logical devices, no process left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

# Read by TensorFlow and Keras when they are imported, here and in the processes tests start.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Inherited by every process that tests start, also by those whose parent has ended.
RUN_TOKEN = uuid.uuid4().hex
os.environ["PYTEST_RUN_TOKEN"] = RUN_TOKEN

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts background jobs that ignore Ctrl-C; what tests start must not inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import psutil  # noqa: E402 - after the settings above, like all that may import TensorFlow
import pytest  # noqa: E402
from absl import flags  # noqa: E402
from devices import create_logical_devices  # noqa: E402

pytest_plugins = ["depth"]

# TensorFlow's own test suites read absl flags, which must have been parsed; pytest's options are
# none of theirs.
flags.FLAGS(["pytest"])

# Helpers of the multiprocessing module; they end with the interpreter.
LIVES_AS_LONG_AS_PYTEST = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, so that no test there can forget the marker."""
    for item in items:
        for folder in ("multi_process", "outside"):
            if folder in item.path.relative_to(Path(__file__).parent).parts:
                item.add_marker(folder)


_last_collection = 0.0
SECONDS_BETWEEN_COLLECTIONS = 8.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported out of later searches for garbage: with TensorFlow, 0.4 s each.

    Tracing makes many objects and little garbage, so that searches may be rarer too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    if hasattr(session.config, "workerinput") and (
        capture := session.config.pluginmanager.getplugin("capturemanager")
    ):
        # What TensorFlow says at its import would come behind the summary of the run.
        capture.read_global_capture()


def pytest_runtest_teardown() -> None:
    """Let iterators go while they are young, and clusters with the test that made them.

    The end of an iterator may wait for tf.data's autotuner, which sleeps the longer the older it
    is. A process that belongs to a cluster trains no model outside of it.
    """
    if (calls := sys.modules.get("keras_het.strategy.keras_calls")) is not None:
        calls._clusters.clear()
    global _last_collection
    if time.monotonic() - _last_collection > SECONDS_BETWEEN_COLLECTIONS:
        gc.collect()
        _last_collection = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Undo what a command that ran in this process set for itself: later tests start processes."""
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture(autouse=True)
def logical_devices_where_tensorflow_is_used() -> None:
    """Create the logical devices, unless nothing has imported TensorFlow (planning tests)."""
    if "tensorflow" in sys.modules:
        create_logical_devices()


@pytest.fixture
def logical_devices() -> tuple[str, ...]:
    """Names of the four logical devices."""
    return create_logical_devices()


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Let layers compute in float64 unless they say otherwise."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def processes_of_this_run() -> list[psutil.Process]:
    """Return all live processes that tests started, orphans included."""
    found = []
    for process in psutil.process_iter():
        try:
            started_here = process.environ().get("PYTEST_RUN_TOKEN") == RUN_TOKEN
            helper = any(name in " ".join(process.cmdline()) for name in LIVES_AS_LONG_AS_PYTEST)
        except psutil.Error:
            continue
        if started_here and not helper and process.pid != os.getpid():
            found.append(process)
    return found


def end_left_processes(patience: float = 5.0) -> list[str]:
    """Kill what tests left running `patience` seconds after the last; return the command lines."""
    _, left = psutil.wait_procs(processes_of_this_run(), timeout=patience)
    descriptions = []
    for process in left:
        try:
            descriptions.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=patience)
    return descriptions


@pytest.fixture(autouse=True, scope="session")
def no_process_left() -> Iterator[None]:
    """Fail the run if a process that a test started outlives it."""
    yield
    left = end_left_processes()
    if left:
        pytest.fail("Tests left these processes running (now killed):\n" + "\n".join(left))
