import argparse
import re
from pathlib import Path

import pytest

from keras_het.launch.command_line import make_parser
from keras_het.launch.local.worker_environment import Emulation

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"


COMMANDS: dict[str, argparse.ArgumentParser] = next(
    dict(action.choices)
    for action in make_parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)


def options_of(command):
    return {name for action in COMMANDS[command]._actions for name in action.option_strings}


def test_the_guide_names_options_that_there_are():
    documented = set(re.findall(r"--[a-z][a-z-]+", (DOCS / "guides/run.md").read_text()))
    # `--epochs` is the documented script's own.
    assert documented - options_of("run") == {"--epochs"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_commands_has_all_of_them_and_their_options(command):
    page = (DOCS / "reference/command_line.md").read_text()
    (section,) = re.findall(
        rf"^## keras-het {command}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    documented = set(re.findall(r"`(-[a-z-]+)`", section))
    assert documented == options_of(command) - {"-h", "--help"}


def test_the_documented_label_is_the_label():
    label = f"[keras-het] {Emulation((4, 2, 1)).describe()}\n"
    assert label in (DOCS / "guides/run.md").read_text()


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS.parent))
)
def test_what_the_launcher_prints_is_shown_with_its_prefixes(page):
    for block in re.findall(r"```\n(\$ keras-het run.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines()[1:]:
            assert re.match(r"\[(keras-het|worker \d+)\] |\.\.\.$", line), line


@pytest.mark.parametrize(
    "page",
    [README, *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: str(page.relative_to(DOCS.parent)),
)
def test_what_is_on_no_index_is_installed_from_a_checkout(page):
    assert not re.search(r"pip install .*keras-het", page.read_text())


@pytest.mark.parametrize(
    "name",
    ["TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "PYTHONUNBUFFERED", "KERAS_BACKEND"]
    + [f"KERAS_HET_{name}" for name in ("EMULATED_DEVICES", "SERVICE_ADDRESS", "SECRET")],
)
def test_variables_are_documented(name):
    assert f"`{name}`" in (DOCS / "reference/command_line.md").read_text()
