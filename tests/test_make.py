"""What `make test` and `make test-all` run, and what they say that they did not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MAKEFILE = TESTS.parent / "Makefile"


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def write_python(path: Path, minor: int) -> None:
    """A command that takes itself for another version of Python, and runs modules with success."""
    write_command(
        path,
        f"""
        [ "$1" = --version ] && echo "Python 3.{minor}.7" && exit
        [ "$1" = -m ] && echo "runs $*" && exit
        exec {sys.executable} -c "import sys; sys.version_info = (3, {minor}, 7)
$2"
        """,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with an environment for lint and tests in which all commands succeed at once."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "overrides.txt", "constraints.txt", "constraints-oldest.txt"):
        (tmp_path / name).touch()
    write_python(tmp_path / ".venv/bin/python", 11)
    for name in ("ruff", "mypy"):
        write_command(tmp_path / ".venv/bin" / name, "exit 0")
    (tmp_path / ".venv/installed").touch()
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # what a `make` that runs these tests was told is not meant for this one
    told = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "CANDIDATES")
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def install_oldest(folder: Path, minor: int) -> None:
    write_python(folder / ".venv-oldest/bin/python", minor)
    (folder / ".venv-oldest/installed").touch()


@pytest.mark.parametrize(
    ("target", "minor", "received", "expected"),
    [
        ("demo", 9, "Python 3.9.7", "3.11 to 3.13 (TensorFlow"),
        ("demo", None, "not found", "3.11 to 3.13 (TensorFlow"),
        *(
            ("test-validation", minor, f"Python 3.{minor}.7", "3.11 (TensorFlow Data Validation")
            for minor in (10, 12, 13)
        ),
    ],
)
def test_another_python_is_refused_before_an_environment_is_made(
    folder: Path, target: str, minor: int | None, received: str, expected: str
) -> None:
    python = folder / "another-python"
    if minor is not None:
        write_python(python, minor)
    made = make(folder, target, f"PYTHON={python}")
    assert made.returncode != 0
    assert re.search(rf"received: {python} .*{re.escape(received)}", made.stderr)
    assert f"expected: a command that starts Python {expected}" in made.stderr
    assert "to fix it: install Python 3.11" in made.stderr
    assert not (folder / ".venv-oldest").exists()


def test_an_environment_that_test_oldest_made_with_3_12_is_refused(folder: Path) -> None:
    install_oldest(folder, 12)
    made = make(folder, "test-validation")
    assert made.returncode != 0
    assert "received: .venv-oldest with Python 3.12.7" in made.stderr
    assert "to fix it: rm -r .venv-oldest" in made.stderr
    assert "tests/loader/validation" not in made.stdout


def test_test_oldest_works_with_3_12(folder: Path) -> None:
    install_oldest(folder, 12)
    made = make(folder, "test-oldest")
    assert made.returncode == 0, made.stderr
    assert "runs -m pytest" in made.stdout


def test_test_runs_the_quick_tests_of_all_rooms(folder: Path) -> None:
    made = make(folder, "test")
    assert made.returncode == 0, made.stderr
    (run,) = [line for line in made.stdout.splitlines() if line.startswith("runs ")]
    rooms = {path.name for path in TESTS.iterdir() if any(path.glob("**/test_*.py"))}
    files = {path.name for path in TESTS.glob("test_*.py")}
    assert "--quick" in run
    assert set(run.split()) >= {f"tests/{name}" for name in rooms | files}


def test_every_file_that_a_target_names_is_there() -> None:
    lists = "$(TESTS) $(OLDEST:%=tests/multi_process/test_%.py) $(OLDEST_LOADER) $(NIGHTLY)"
    rules = f"include {MAKEFILE}\nshow:\n\t@echo {lists} $(ON_VERSIONS) $(ON_GPU:%=tests/%)\n"
    command = ["make", "-s", "-f", "-", "show"]
    done = subprocess.run(command, input=rules, capture_output=True, text=True, cwd=TESTS.parent)
    named = done.stdout.split()
    assert len(named) > 40
    assert [name for name in named if not (TESTS.parent / name).exists()] == []


def test_test_all_runs_everything(folder: Path) -> None:
    write_python(folder / "python3.11", 11)
    install_oldest(folder, 11)
    made = make(folder, "test-all")
    assert made.returncode == 0, made.stderr
    runs = [line for line in made.stdout.splitlines() if line.startswith("runs ")]
    assert not any("--quick" in run for run in runs)
    for part in ("-m not alone", "-m alone", "test_hybrid.py", "tests/loader/validation"):
        assert any(part in run for run in runs), part


def test_test_all_says_that_data_validation_was_not_run(folder: Path) -> None:
    python = folder / "another-python"
    write_python(python, 12)
    install_oldest(folder, 12)
    made = make(folder, "test-all", f"PYTHON={python}")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1].startswith("The tests of data validation were NOT run")
    assert "runs -m pytest tests/loader/validation" not in made.stdout


@pytest.mark.parametrize("python", ["", "PYTHON={}/python3.11"])
def test_test_all_runs_data_validation_with_3_11(folder: Path, python: str) -> None:
    write_python(folder / "python3.11", 11)
    install_oldest(folder, 11)
    made = make(folder, "test-all", *filter(None, [python.format(folder)]))
    assert made.returncode == 0, made.stderr
    assert "runs -m pytest tests/loader/validation" in made.stdout
    assert "NOT run" not in made.stdout
