"""Code of README and docs: Python runs, and commands are those that their programs take."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_workers import ForkServer, Workers
from pages import GIVEN, PAGES, REPOSITORY, blocks_of, commands_of, name, script_of

from keras_het.launch.command_line import parse_arguments

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name)
# The slowest pages; a quick run has all others.
FULL = ("docs/guides/large_models.md",)


def test_blocks_are_found_and_those_that_do_not_run_give_a_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nx = 1\n```\n\n<!-- not run: needs two machines -->\n"
        "```bash\nexport A='1\n2'\nB=3 python train.py --a  # why\n```\n\n```python\nx += 1\n```\n"
    )
    first, second, third = blocks_of(page)
    assert (first.not_run, second.not_run, third.not_run) == ("", "needs two machines", "")
    assert commands_of(second) == [["export", "A=1\n2"], ["python", "train.py", "--a"]]
    assert script_of(page).splitlines()[3] == "x = 1"
    assert script_of(page).splitlines()[14] == "x += 1"


@EVERY_PAGE
def test_each_comment_of_a_block_is_one_that_is_known(page: Path) -> None:
    text = page.read_text()
    comments = re.findall(r"<!--.*?-->", text, re.DOTALL)
    not_run = [comment for comment in comments if comment != GIVEN]
    assert len(not_run) == sum(bool(block.not_run) for block in blocks_of(page))


@EVERY_PAGE
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text)
        assert block.language or not re.search(r"^(import|from) ", block.text, re.MULTILINE)


# tests/recipes/test_readme.py runs those that a reader saves as a file.
RUN_HERE = [
    pytest.param(page, id=name(page), marks=[pytest.mark.full] if name(page) in FULL else [])
    for page in PAGES
    if script_of(page) and not any(block.file for block in blocks_of(page))
]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.mark.parametrize("page", RUN_HERE)
@pytest.mark.multi_process
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    script = tmp_path / page.name
    script.write_text(script_of(page))
    process = Workers(fork_server, str(script), [{"CUDA_VISIBLE_DEVICES": ""}], tmp_path)
    try:
        (result,) = process.wait()
    finally:
        process.close()
    assert result.exit_code == 0, result.output


@EVERY_PAGE
def test_commands_are_those_that_their_programs_take(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(page)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()  # what the reader has
    for block in blocks:
        if block.language == "bash" and not block.not_run:
            for command in commands_of(block):
                check(command)


def check(command: list[str]) -> None:
    program, *arguments = command
    if program == "keras-het":
        parse_arguments(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), command
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), command
    elif program == "python":
        assert any(folder.joinpath(arguments[0]).is_file() for folder in (Path(), REPOSITORY))
    else:
        assert program in ("pip", "uv"), f"not known, so mark it as not run: {command}"
        check_install(" ".join(arguments))


def check_install(arguments: str) -> None:
    declared = (REPOSITORY / "pyproject.toml").read_text()
    for extra in re.findall(r"\[([\w-]+)\]", arguments):
        assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), arguments
    for group in re.findall(r"--group (\S+)", arguments):
        assert re.search(rf"^{group} = \[", declared, re.MULTILINE), arguments
    for file in re.findall(r"--(?:override|constraint) (\S+)", arguments):
        assert (REPOSITORY / file).is_file(), arguments


@pytest.mark.parametrize(
    "command",
    [
        ["keras-het", "run", "--speed", "2,1", "train.py"],
        ["make", "everything"],
        ["python", "recipes/none.py"],
        ["pip", "install", ".[none]"],
        ["rm", "-r", "."],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_noticed(command: list[str]) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(command)
