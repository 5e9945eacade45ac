"""Rules about the pages that no other tool checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, README, REPOSITORY, name

GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
CODE = [
    path
    for folder in ("keras_het", "recipes", "benchmarks")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_is_read_in_minutes(page: Path) -> None:
    assert len(page.read_text().split()) <= 1200


def test_all_pages_are_read_in_an_afternoon() -> None:
    assert len([page for page in PAGES if page != README]) <= 23
    assert sum(len(page.read_text().split()) for page in PAGES) <= 20_000


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
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:recipes/\w+\.py|benchmarks/\w+(?:\.py|/\w+\.md))", page.read_text())
    assert [file for file in named if not (REPOSITORY / file).is_file()] == []


def test_pages_that_the_code_names_are_there() -> None:
    named = {
        page
        for path in CODE
        for page in re.findall(r"\b(?:docs|benchmarks/results)/[\w/]+\.md", path.read_text())
    }
    assert len(named) > 3
    assert [page for page in sorted(named) if not (REPOSITORY / page).is_file()] == []


def test_measured_names_every_file_of_results() -> None:
    page = (REPOSITORY / "docs/measured.md").read_text()
    results = sorted((REPOSITORY / "benchmarks/results").iterdir())
    assert [name(file) for file in results if file.name not in page] == []
    assert len(page.split()) <= 1500


def test_no_page_claims_more_than_was_run_on_gpus() -> None:
    _, _, rest = (REPOSITORY / "docs/measured.md").read_text().partition("\n## On a GPU\n")
    section = " ".join(rest.partition("\n## ")[0].split())
    results = (REPOSITORY / "benchmarks/results/gpu.md").read_text()
    assert "not run on several GPUs, on GPUs that differ, or with NCCL" in section
    assert "Not run: several GPUs, GPUs that differ, NCCL." in results
    numbers = re.findall(r"\b\d+(?:\.\d+)?\b", section)
    assert [number for number in numbers if number not in results] == []
    for page in (REPOSITORY / "README.md", REPOSITORY / "docs/index.md"):
        assert "measured.md#on-a-gpu" in page.read_text(), page


def test_nothing_says_to_install_what_no_registry_has() -> None:
    told = re.compile(r"pip install (--[\w-]+ )*[\'\"]?keras[-_]het")
    assert [path for path in [*CODE, *PAGES] if told.search(path.read_text())] == []
