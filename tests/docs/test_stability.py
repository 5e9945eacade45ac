"""What README, the reference and the code say of experimental parts is the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

from pages import README, REPOSITORY
from test_reference import LISTED, named

from keras_het.stability import NOTE, experimental

MARK = '__keras_het_stability__ = "experimental"'
# What is behind a row of README's table of features.
PARTS = {
    "slow links": (
        *("callbacks.BucketTuner", "summation", "planning.plan_summation"),
        "planning.SummationPlan",
    ),
    "async workers": (
        *("callbacks.AsyncWorkers", "asynchronous", "rules", "planning.advise_roles"),
        *("planning.plan_pushes", "planning.ClusterSpeeds", "planning.ExchangeSettings"),
        *("planning.ModePrediction", "planning.PushPlan", "planning.RolePlan", "ServiceLostError"),
    ),
    "local training": ("callbacks.LocalTraining",),
    "`PipelineStrategy`": ("PipelineStrategy", "planning.pipeline"),
    "`ElasticBackup`": ("callbacks.ElasticBackup", "ray"),
    "`DataValidation`": ("callbacks.DataValidation", "loader.validation"),
}


def public_symbols() -> dict[str, object]:
    """Classes and functions of the reference by name."""
    found: dict[str, object] = {}
    for path in LISTED:
        try:
            value = named(path)
        except ImportError:  # data validation, in most environments
            folder = REPOSITORY / path.replace(".", "/")
            (names,) = re.findall(
                r"__all__ = (\[.*?\])", (folder / "__init__.py").read_text(), re.S
            )
            found |= {f"{path}.{name}": None for name in ast.literal_eval(names)}
            continue
        names = value.__all__ if isinstance(value, ModuleType) else [""]
        found |= {f"{path}.{name}".strip("."): getattr(value, name, value) for name in names}
    return {name: value for name, value in found.items() if value is None or callable(value)}


def is_experimental(path: str, value: object) -> bool:
    if getattr(value, "__keras_het_stability__", "") == "experimental":
        return True
    modules = (Path(*module.split(".")) for module in (path, getattr(value, "__module__", "")))
    files = (
        REPOSITORY / folder / "__init__.py"
        for module in modules
        for folder in (module, *module.parents)
    )
    return any(MARK in file.read_text() for file in files if file.is_file())


def test_readme_and_code_name_the_same_parts() -> None:
    table = README.read_text().partition("## Features")[2].partition("## Limits")[0]
    marked = [row for row in table.splitlines() if "*(experimental)*" in row]
    assert marked and all(any(f"[{part}]" in row for part in PARTS) for row in marked)
    assert all(any(f"[{part}]" in row for row in marked) for part in PARTS)
    begins = tuple(f"keras_het.{name}" for names in PARTS.values() for name in names)
    for path, value in public_symbols().items():
        expected = any(path == begin or path.startswith(f"{begin}.") for begin in begins)
        assert is_experimental(path, value) == expected, path


def test_a_marked_symbol_says_so() -> None:
    @experimental
    class Sample:
        """A class.

        Args:
            none.
        """

    assert Sample.__keras_het_stability__ == "experimental"
    assert Sample.__doc__ == f"A class.\n\nArgs:\n    none.\n\n{NOTE}"
