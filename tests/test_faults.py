"""The table of deliberate faults fits the code, and faults that no test finds are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, Fault
from find_faults import ROOT, look_for_all, present, run_tests
from test_rooms import ROOMS, files_of

SENTENCES = [fault.sentence for fault in FAULTS]
WRONG = Fault("adds wrongly", "code.py", "a + b", "a - b", ("test_sums.py",))
UNSEEN = Fault("prints wrongly", "code.py", "'sum'", "'product'", ("test_sums.py",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("def add(a, b):\n    return a + b\n\nname = 'sum'\n")
    (tmp_path / "tests/test_sums.py").write_text(
        "import code\n\ndef test_add():\n    assert code.add(2, 3) == 5\n"
    )
    (tmp_path / "tests/conftest.py").write_text('pytest_plugins = ["depth"]\n')
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers =\n  full\n  alone\n  quick\n"
    )
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS, ids=SENTENCES)
def test_a_fault_can_be_put_into_the_code(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert source.count(fault.text) == 1
    compile(source.replace(fault.text, fault.replacement), fault.file, "exec")
    assert fault.replacement != fault.text
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert (ROOT / "tests" / path).exists()
        assert name in (ROOT / "tests" / path).read_text()


def test_every_room_has_a_fault() -> None:
    rooms = {str(Path(fault.file).parent) for fault in FAULTS}
    assert rooms >= {
        str(file.parent.relative_to(ROOT)) for room in ROOMS for file in files_of(room)
    }
    assert len(set(SENTENCES)) == len(FAULTS) >= 40


def test_a_fault_that_no_test_finds_is_reported(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look_for_all([WRONG, UNSEEN], checkout) == [UNSEEN]
    lines = capsys.readouterr().out.splitlines()
    assert any("found" in line and "test_sums.py::test_add" in line for line in lines)
    assert any("NOT FOUND" in line and "all tests passed" in line for line in lines)
    assert lines[-1] == "1 of 2 faults were found."


def test_a_fault_leaves_the_copy_as_it_was(checkout: Path) -> None:
    before = (checkout / "code.py").read_text()
    with pytest.raises(RuntimeError), present(WRONG, checkout):
        assert "a - b" in (checkout / "code.py").read_text()
        raise RuntimeError
    assert (checkout / "code.py").read_text() == before
    twice = Fault("", "code.py", "a", "b", ())
    with pytest.raises(ValueError, match="has 'a' 4 times, not once"), present(twice, checkout):
        pass


@pytest.mark.full
def test_tests_that_do_not_end_find_nothing(checkout: Path) -> None:
    (checkout / "tests/test_sums.py").write_text("import threading\nthreading.Event().wait()\n")
    code, _ = run_tests(["tests/test_sums.py"], checkout, seconds=3.0)
    assert code == -1
