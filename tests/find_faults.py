"""Puts each deliberate fault into a copy of this checkout; do the quick tests find it?

python tests/find_faults.py                    # all of `deliberate_faults.txt`
python tests/find_faults.py strategy/exact     # those whose file or sentence has one of these words
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
COPIES = 2
SECONDS = 600.0
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")


@contextlib.contextmanager
def present(fault: Fault, copy: Path) -> Iterator[None]:
    """Puts a fault into a copy, and takes it out again."""
    path = copy / fault.file
    source = path.read_text()
    if source.count(fault.text) != 1:
        raise ValueError(
            f"{fault.file} has {fault.text!r} {source.count(fault.text)} times, not once: correct "
            f"the entry {fault.sentence!r} of tests/deliberate_faults.txt"
        )
    path.write_text(source.replace(fault.text, fault.replacement))
    try:
        yield
    finally:
        path.write_text(source)


def run_tests(tests: Sequence[str], copy: Path, seconds: float = SECONDS) -> tuple[int, str]:
    """Exit code of pytest in a copy, and what it printed; -1 where it did not end in time."""
    command = [sys.executable, "-m", "pytest", "--quick", "--exitfirst", "--quiet", *tests]
    # The copy comes before the checkout that is installed; no bytecode of another fault is used.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, process.communicate()[0]
    return process.returncode, output


def look_for(fault: Fault, copy: Path) -> tuple[bool, str]:
    """Whether the tests of a fault fail with it, and a line about that."""
    began = time.monotonic()
    with present(fault, copy):
        code, output = run_tests([f"tests/{name}" for name in fault.tests], copy)
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    seconds = f"{time.monotonic() - began:3.0f} s"
    if code == 1 and failures:
        return True, f"found      {seconds}  {fault.sentence}: {failures[0].split(' - ')[0]}"
    how = {0: "all tests passed", -1: "tests did not end"}.get(code, output[-2000:])
    return False, f"NOT FOUND  {seconds}  {fault.sentence}: {how}"


def look_for_all(faults: Sequence[Fault], root: Path = ROOT) -> list[Fault]:
    """Prints a line for each fault; returns those that were not found."""
    missed: list[Fault] = []
    here = threading.local()
    with tempfile.TemporaryDirectory() as folder:

        def copy_of_this_thread() -> Path:
            if not hasattr(here, "copy"):
                here.copy = Path(tempfile.mkdtemp(dir=folder)) / "copy"
                shutil.copytree(root, here.copy, ignore=NOT_COPIED)
            return here.copy

        def look(fault: Fault) -> None:
            found, line = look_for(fault, copy_of_this_thread())
            print(line, flush=True)
            if not found:
                missed.append(fault)

        with ThreadPoolExecutor(COPIES) as threads:
            list(threads.map(look, faults))
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were found.")
    return missed


def main(words: Sequence[str]) -> int:
    chosen = [
        fault
        for fault in FAULTS
        if not words or any(word in f"{fault.file} {fault.sentence}" for word in words)
    ]
    return 1 if look_for_all(chosen) or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
