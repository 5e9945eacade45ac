"""The page of error messages has messages that the code really has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import REPOSITORY

PAGE = REPOSITORY / "docs/troubleshooting.md"
GAP = "…"


def texts(tree: ast.AST) -> Iterator[str]:
    """All strings, with a gap where a value is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else GAP for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[sdgf]", GAP, node.value)


@pytest.fixture(scope="module")
def messages() -> str:
    files = sorted((REPOSITORY / "keras_het").rglob("*.py"))
    return "\n".join(text for file in files for text in texts(ast.parse(file.read_text())))


def headings() -> list[str]:
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def test_no_heading_comes_twice() -> None:
    assert len(headings()) == len(set(headings())) > 15


@pytest.mark.parametrize("heading", headings())
def test_a_heading_is_how_a_message_begins(heading: str, messages: str) -> None:
    assert re.search(rf"(?m)^(\[\w+\] )?{re.escape(heading)}", messages), heading


def test_the_messages_of_other_code_are_not_found(messages: str) -> None:
    assert "The page of error messages has messages" not in messages
    assert Path(__file__).name not in messages
