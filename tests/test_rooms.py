"""Rooms of the code: each has a sentence and few files, and imports point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "keras_het"
# A room may import from those above it.
ROOMS = [
    *("planning", "planning.balance", "planning.roles", "planning.loader"),
    "planning.pipeline",
    "planning.diagnosis",
    "tensorboard",
    ".",
    *("fit", "exchange"),
    *("loader", "loader.order", "loader.iterators"),
    *("loader.input", "loader.validation"),
    *("strategy.measure", "strategy.batches", "strategy.exact", "strategy.cluster"),
    *("summation", "strategy"),
    "strategy.pipeline",
    *("asynchronous", "rules", "asynchronous.parameter_service"),
    "asynchronous.exchange",
    "local_training",
    "telemetry",
    "callbacks",
    *("launch.local", "launch.doctor", "ray", "launch"),
]
MOST_FILES = 17


def files_of(room: str) -> list[Path]:
    folder = PACKAGE / room.replace(".", "/") if room != "." else PACKAGE
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def room_of(module: str) -> str:
    """The room of a module or of what is imported from one, without the name of the package."""
    parts = module.split(".")
    while parts:
        if ".".join(parts) in ROOMS:
            return ".".join(parts)
        parts.pop()
    return "."


def imports_of(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_het"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix("keras_het.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("keras_het."):
                    yield alias.name.removeprefix("keras_het.")


def test_every_folder_is_a_room() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    names = {".".join(folder.relative_to(PACKAGE).parts) or "." for folder in folders}
    assert names == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_in_a_line_what_may_be_in_it(room: str) -> None:
    path = PACKAGE / (room.replace(".", "/") if room != "." else "") / "__init__.py"
    sentence = ast.get_docstring(ast.parse(path.read_text()))
    assert sentence is not None and sentence.splitlines()[0].endswith(".")
    assert len(files_of(room)) <= MOST_FILES


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in files_of(room)
        if path.name != "__main__.py"
        for module in imports_of(path)
        if room_of(module) not in allowed
    ]
    assert wrong == []


def test_a_forbidden_import_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from keras_het.callbacks import batch_balancer\n")
    assert [room_of(module) for module in imports_of(path)] == ["callbacks"]
    path.write_text("import keras_het.strategy.exact.step\nfrom keras_het import usable_cpus\n")
    assert [room_of(module) for module in imports_of(path)] == ["strategy.exact", "."]
