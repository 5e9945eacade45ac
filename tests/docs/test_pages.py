"""Rules about the pages that no other tool checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, REPOSITORY, name

GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
CODE = [
    path
    for folder in ("keras_het", "recipes", "benchmarks")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_is_read_in_minutes(page: Path) -> None:
    assert len(page.read_text().split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_modules_as_they_are_imported(page: Path) -> None:
    paths = re.findall(r"[\w/]+/\w+\.py\b", page.read_text())
    assert [path for path in paths if path.split("/")[0] not in ("recipes", "benchmarks")] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_scripts_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:recipes|benchmarks)/\w+\.py\b", page.read_text())
    assert [script for script in named if not (REPOSITORY / script).is_file()] == []


def test_pages_that_the_code_names_are_there() -> None:
    named = {page for path in CODE for page in re.findall(r"docs/[\w/]+\.md", path.read_text())}
    assert len(named) > 3
    assert [page for page in sorted(named) if not (REPOSITORY / page).is_file()] == []
