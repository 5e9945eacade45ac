"""The recipe of the data service says "each once" only where that is so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "feed_from_elsewhere.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("feed_from_elsewhere", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_samples_that_came_once(recipe: ModuleType, capsys) -> None:
    recipe.show({"fast": [[0, 3], [1]], "slow": [[2, 4]]}, 5)
    assert "3 batches of 8, of 5 samples: each once." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"fast": [[0, 1]], "slow": [[2]]}, "of 5 samples once. 2 did not arrive, 0 came more"),
        ({"fast": [[0, 1, 2, 3, 4]], "slow": [[4]]}, "0 did not arrive, 1 came more than once"),
        ({"fast": [], "slow": []}, "5 did not arrive"),
    ],
)
def test_others_are_counted(recipe: ModuleType, capsys, got, message) -> None:
    with pytest.raises(SystemExit, match=message):
        recipe.show(got, 5)
    assert "each once" not in capsys.readouterr().out
