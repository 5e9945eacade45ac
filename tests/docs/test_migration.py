"""The scripts of the page on migration train, before and after its changes."""

from __future__ import annotations

import re

import pytest
from pages import REPOSITORY

DIFFS = re.findall(
    r"^## (.+?)$.*?```diff\n(.*?)```",
    (REPOSITORY / "docs/migrate.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def side(diff: str, sign: str) -> str:
    """A script with the lines of one sign, and those without any."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


@pytest.mark.parametrize(("title", "diff"), DIFFS, ids=[title for title, _ in DIFFS])
def test_both_sides_are_python(title: str, diff: str) -> None:
    for sign in "-+":
        compile(side(diff, sign), title, "exec")


@pytest.mark.usefixtures("logical_devices")
@pytest.mark.parametrize(
    ("title", "sign"),
    [
        pytest.param("From MirroredStrategy", "-", marks=pytest.mark.full),
        ("From MirroredStrategy", "+"),
        ("From MultiWorkerMirroredStrategy", "+"),
    ],
)
def test_a_script_trains(title: str, sign: str) -> None:
    found: dict[str, object] = {}
    exec(side(dict(DIFFS)[title], sign), found)
    assert found["model"].optimizer.iterations.numpy() == 2 * 64 // 16  # type: ignore[attr-defined]
