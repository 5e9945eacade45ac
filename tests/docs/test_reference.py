"""What the reference lists has a docstring: each name, and each method that a reader may call."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
# Names of objects in guides.
USED = {
    "balancer": ["keras_het.callbacks.BatchBalancer"],
    "batches": ["keras_het.loader.GlobalOrderDataset"],
    "dataset": ["keras_het.loader.GlobalOrderDataset"],
    "strategy": ["keras_het.HeterogeneousStrategy", "keras_het.PipelineStrategy"],
    "telemetry": ["keras_het.callbacks.Telemetry"],
    "tuner": ["keras_het.callbacks.LoaderTuner", "keras_het.callbacks.BucketTuner"],
}
LISTED = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)


def named(path: str) -> Any:
    """The module, class or function with this dotted name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _is_ours(member: Any) -> bool:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", "")).startswith("keras_het")


def undocumented(path: str, value: Any) -> list[str]:
    if isinstance(value, ModuleType):
        return [
            missing
            for name in value.__all__
            for missing in undocumented(f"{path}.{name}", getattr(value, name))
        ]
    missing = [] if not callable(value) or inspect.getdoc(value) else [path]
    if inspect.isclass(value):
        missing += [
            f"{path}.{name}"
            for name, member in inspect.getmembers(value)
            if not name.startswith("_") and _is_ours(member) and not inspect.getdoc(member)
        ]
    return missing


@pytest.mark.parametrize("path", LISTED)
def test_each_name_of_the_reference_has_a_docstring(path):
    if "validation" in path:
        pytest.importorskip("tensorflow_data_validation")
    assert undocumented(path, named(path)) == []


def listed_of(path: str) -> set[str]:
    """Attributes that the reference has of a class: those it lists, and those of its docstring."""
    pages = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    entries = re.findall(rf"^::: {re.escape(path)}\n((?: +.*\n|\n(?= ))*)", pages, re.MULTILINE)
    attributes = (inspect.getdoc(named(path)) or "").partition("Attributes:")[2]
    found = re.findall(r"^ {4}([\w, ]+):", attributes, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join([*entries, *found])))


@pytest.mark.parametrize("name", USED)
def test_what_guides_use_is_in_the_reference(name):
    docs = REFERENCE.parent
    pages = [docs.parent / "README.md", *docs.rglob("*.md")]
    used = {
        attribute
        for page in pages
        for attribute in re.findall(rf"(?<![\w/.-]){name}\.([a-z_]+)", page.read_text())
    }
    inherited = {"md", "py", *dir(tf.distribute.Strategy), *dir(tf.data.Dataset)}
    listed = set.union(*map(listed_of, USED[name]))
    assert used - inherited - listed == set()


def test_each_public_attribute_of_the_strategy_is_in_the_reference():
    strategy = named("keras_het.HeterogeneousStrategy")
    source = inspect.getsource(strategy)
    assigned = set(re.findall(r"^ +self\.([a-z]\w*)(?:: .+)? = ", source, re.MULTILINE))
    ours = {name for name in vars(strategy) if not name.startswith("_")} | assigned
    assert (
        ours - set(dir(tf.distribute.Strategy)) - listed_of("keras_het.HeterogeneousStrategy")
        == set()
    )


def test_a_method_without_a_docstring_is_found():
    bare = type("Bare", (), {"__doc__": "A class.", "__module__": "keras_het"})
    bare.run = lambda self: None
    bare.run.__module__ = "keras_het"

    assert undocumented("Bare", bare) == ["Bare.run"]
