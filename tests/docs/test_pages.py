"""Rules about the pages that no other tool checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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


def pages_of(navigation: Any) -> list[str]:
    """The pages in a part of the navigation, whatever their titles."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    yaml = pytest.importorskip("yaml")
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    docs = REPOSITORY / "docs"
    pages = sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    assert sorted(pages_of(yaml.safe_load(navigation))) == pages


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


def test_what_was_run_on_gpus_is_said_in_one_place() -> None:
    page = REPOSITORY / "docs/measured/gpu.md"
    _, _, rest = page.read_text().partition("## In short\n")
    paragraph, _, tables = rest.partition("## Is it right?")
    passed, others = re.search(
        r"of 548 tests (\d+) pass .* (\d+) find", " ".join(paragraph.lower().split())
    ).groups()  # type: ignore[union-attr]
    assert int(passed) == 532 + 9 == 548 - int(others) - 1
    assert "Of 548 tests 532 passed at once, and 9 after" in tables
    for number in re.findall(r"\d+\.\d+", paragraph):
        assert number in tables, number
    links = ("README.md", "docs/index.md", "docs/measured/index.md", "docs/guides/balance.md")
    for name_of_page in (*links, "docs/guides/slow_device.md"):
        assert "gpu.md#in-short" in (REPOSITORY / name_of_page).read_text(), name_of_page
    for other in PAGES:
        assert "untried" not in other.read_text(), other


def test_nothing_says_to_install_what_no_registry_has() -> None:
    told = re.compile(r"pip install (--[\w-]+ )*[\'\"]?keras[-_]het")
    assert [path for path in [*CODE, *PAGES] if told.search(path.read_text())] == []
