"""What `--quick` leaves out, what it says about that, and what is collected without TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WITHOUT_TENSORFLOW = ("planning", "launch", "benchmarks", "recipes", "multi_process")
INI = f"""
[pytest]
pythonpath = {TESTS}
markers =
  full
  alone
  quick
"""
SOME_TESTS = """
import pytest
from depth import examples
from hypothesis import given, strategies

def test_always(): pass

@pytest.mark.full
def test_of_a_full_run(): pass

@pytest.mark.alone
def test_that_measures(): pass

@pytest.mark.quick("two")
@pytest.mark.parametrize("which", ["one", "two", "three"])
def test_of_one_parameter(which): pass

drawn = []

@examples(60)
@given(strategies.integers())
def test_property(number): drawn.append(number)

def test_how_many(): print("drew", len(drawn))
"""


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-s", "-c", str(folder / "pytest.ini"), "room"]
    own = {name: value for name, value in os.environ.items() if name != "STARTED"}  # by make
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/conftest.py").write_text('pytest_plugins = ["depth"]\n')
    (tmp_path / "room/test_some.py").write_text(SOME_TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    return tmp_path


def summary(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith("test_some ")]
    return line.split()[1:]


@pytest.mark.quick("processes0")
@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_a_quick_run_says_what_it_left_out(folder: Path, processes: list[str]) -> None:
    output = run(folder, "--quick", *processes)
    assert summary(output) == ["4", "0", "0", "0", "4"], output  # passed, ..., left
    *_, took, last = output.splitlines()
    assert took.startswith("Took 0 min ") and "Left to make test-all: 4 tests" in took
    assert last.startswith("property tests at full depth")


@pytest.mark.full
def test_examples(folder: Path) -> None:
    assert "drew 60" in run(folder)
    assert "drew 20" in run(folder, "--quick")


def test_a_full_run_has_everything(folder: Path) -> None:
    output = run(folder)
    assert "8 passed" in output and "Left to make test-all" not in output


@pytest.mark.full
def test_a_run_ends_in_time(folder: Path) -> None:
    assert "8 passed" in run(folder, "--minutes", "5")
    output = run(folder, "-rs", "--minutes", "0")
    assert "8 skipped" in output and "not reached in 0 minutes" in output


def test_a_name_that_no_parameter_has_is_an_error(folder: Path) -> None:
    file = folder / "room/test_some.py"
    file.write_text(file.read_text().replace('quick("two")', 'quick("four")'))
    assert "do not have: {'room/test_some.py::test_of_one_parameter': ['four']}" in run(folder)


@pytest.mark.full
def test_some_tests_can_be_chosen(folder: Path) -> None:
    assert "3 passed" in run(folder, "--quick", "-k", "always or one_parameter or property")
    assert "1 passed" in run(folder, "--quick", "-k", "always")


def test_rooms_that_are_collected_without_tensorflow() -> None:
    program = f"""
import sys, pytest
code = pytest.main(["--collect-only", "-qq", *{[str(TESTS / room) for room in WITHOUT_TENSORFLOW]}])
assert code == 0, code
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.full
def test_quick_and_rest_are_all_tests(folder: Path) -> None:
    def collected(*arguments: str) -> list[str]:
        lines = run(folder, "--collect-only", "-q", *arguments).splitlines()
        return sorted(line for line in lines if "::" in line)

    quick, rest = collected("--quick"), collected("--rest")
    assert len(quick) == len(rest) == 4
    assert sorted(quick + rest) == collected()
