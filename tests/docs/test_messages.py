"""All texts that the package prints, raises or logs; run as a program, this lists them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages import REPOSITORY

FEWEST_WORDS = 4  # shorter ones are names, keys and formats
NOT_PLAIN = re.compile(
    r"\b(anew|data sets?|go(es)? on|going on|is told|are told|mend(ed)?|none of the|shall|upon|"
    r"whilst|wish(es)?)\b",
    re.IGNORECASE,
)


class Message(NamedTuple):
    file: str
    line: int
    text: str


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages_in(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    apart |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        text = text_of(node)
        if id(node) not in apart and len(text.split()) >= FEWEST_WORDS:
            file = str(path.relative_to(REPOSITORY))
            yield Message(file, node.lineno, text)


def all_messages() -> list[Message]:
    paths = sorted((REPOSITORY / "keras_het").rglob("*.py"))
    return [message for path in paths for message in sorted(set(messages_in(path)))]


def test_messages_are_plain_english() -> None:
    messages = all_messages()
    assert len(messages) > 1000, "not all files are read"
    assert [message for message in messages if NOT_PLAIN.search(message.text)] == []


if __name__ == "__main__":
    for message in all_messages():
        print(f"{message.file}:{message.line}: {message.text}")
