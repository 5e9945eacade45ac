"""Readers' first questions have their answers at most two clicks from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import README, REPOSITORY

QUESTIONS = [
    tuple(line.split(" | "))
    for line in (Path(__file__).parent / "first_questions.txt").read_text().splitlines()
    if " | " in line
]


def links_of(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", page.read_text())
    return {(page.parent / each).resolve() for each in found}


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize(("question", "place"), QUESTIONS)
def test_the_answer_is_near(question: str, place: str) -> None:
    name, _, anchor = place.partition("#")
    page = REPOSITORY / name
    assert anchor in anchors_of(page)
    first = links_of(README)
    assert page in {README, *first, *(second for each in first for second in links_of(each))}


def test_three_readers_asked_ten_each() -> None:
    assert len(QUESTIONS) == 30
