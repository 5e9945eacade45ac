"""Without the extra packages a recipe says how to get them."""

import importlib
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "package"),
    [
        ("digits", "sklearn"),
        ("quickstart_figure", "matplotlib"),
        ("straggler_figure", "matplotlib"),
        ("tune_loader_figure", "matplotlib"),
    ],
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, recipe: str, package: str) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.delitem(sys.modules, recipe, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install '\.\[recipes\]'"):
        importlib.import_module(recipe)
