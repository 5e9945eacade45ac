"""What the code blocks of README and docs are, and where they stand."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Comments that a reader does not see: why a block does not run here, and what a page relies on.
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
GIVEN = "<!-- given: model -->"


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Args:
        language: what stands behind the fence.
        line: number of its first line of code in the page, from 1.
        lines: its code.
        not_run: why it does not run here; empty if it runs.
    """

    language: str
    line: int
    lines: tuple[str, ...]
    not_run: str

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def file(self) -> str:
        """Name of the file that a reader saves it as, `# train.py` in its first line, or empty."""
        named = re.fullmatch(r"# (\w+\.py)", self.lines[0]) if self.lines else None
        return named[1] if named else ""


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def blocks_of(page: Path) -> list[Block]:
    found, before = [], ""
    lines = page.read_text().splitlines()
    i = 0
    while i < len(lines):
        opened = re.fullmatch(r"```(\w*)", lines[i])
        if opened:
            end = lines.index("```", i + 1)
            marker = NOT_RUN.fullmatch(before)
            found.append(
                Block(opened[1], i + 2, tuple(lines[i + 1 : end]), marker[1] if marker else "")
            )
            i = end
        if lines[i].strip():
            before = lines[i]
        i += 1
    return found


def script_of(page: Path) -> str:
    """The page's Python that runs, each line where it stands in the page, as tracebacks show it."""
    script: list[str] = []
    for block in blocks_of(page):
        if block.language == "python" and not block.not_run:
            script += [""] * (block.line - 1 - len(script)) + list(block.lines)
    if script and GIVEN in page.read_text():
        script[0] = "from given_model import *"
    return "\n".join(script)


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command, without settings of the environment before it."""
    commands, text = [], ""
    for line in block.lines:
        text = f"{text}\n{line}" if text else line
        if text.endswith("\\"):
            continue
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError:  # a quotation continues in the next line
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            commands.append(words)
        text = ""
    if text:
        raise ValueError(f"line {block.line}: this command does not end: {text}")
    return commands
