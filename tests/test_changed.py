"""Which tests a change needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import changed
import pytest


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("keras_het/planning/shares.py", "README.md", "tests/fit/helper.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("fit/test_b", "planning/test_a", "recipes/test_readme", "docs/test_pages"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first", "--date", "2026-01-01T00:00:00")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    return tmp_path


def test_every_path_of_the_table_exists() -> None:
    for begin, tests in changed.TESTS_OF.items():
        assert (changed.ROOT / begin).exists(), begin
        for path in tests:
            assert changed.test_files(path), path


def test_the_longest_beginning_decides() -> None:
    planning = changed.tests_of(["keras_het/planning/balance/boa.py"])
    assert planning and all(file.startswith("planning/") for file in planning)
    exact = changed.tests_of(["keras_het/strategy/exact/train_step.py"])
    assert "exactness/test_exact_fit.py" in exact and "strategy/test_agreement.py" not in exact
    assert changed.tests_of(["LICENSE"]) == []


def test_changed_tests_are_run(checkout: Path) -> None:
    assert changed.tests_of(["tests/planning/test_a.py", "tests/gone/test_c.py"]) == [
        "planning/test_a.py"
    ]
    assert changed.tests_of(["tests/fit/helper.py", "tests/fit/test_b.py"]) == ["fit/test_b.py"]


def test_what_is_committed_and_what_is_not_has_changed(checkout: Path) -> None:
    git(checkout, "tag", "base")
    (checkout / "README.md").write_text("text")
    git(checkout, "commit", "-q", "-a", "-m", "second")
    (checkout / "keras_het/planning/shares.py").write_text("code")
    assert changed.changed_files("base") == ["README.md", "keras_het/planning/shares.py"]
    assert set(changed.changed_files("")) >= {"README.md", "keras_het/planning/shares.py"}


def test_all_files_follow_and_begin_elsewhere_after_a_commit(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE", "HEAD")
    (checkout / "keras_het/planning/shares.py").write_text("code")
    changed.main(["--all"])
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "tests/planning/test_a.py"
    assert sorted(first) == [f"tests/{file}" for file in changed.test_files()]
    changed.main([])
    assert capsys.readouterr().out.splitlines() == first[:1]
    before = changed.rotated(list("abcdefgh"))
    git(checkout, "commit", "-q", "-a", "-m", "second")
    after = changed.rotated(list("abcdefgh"))
    assert sorted(after) == sorted(before) and after != before


def test_a_folder_without_history_has_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_some.py").touch()
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed_files("") == []
    assert changed.rotated(changed.test_files()) == ["test_some.py"]
