"""A pytest plug-in: tests that build `tf.distribute.MirroredStrategy` build ours instead.

Writes to the file named by SWAPPED_STRATEGY_REPORT which devices each strategy was built with, and
the outcome of every test.
"""

import json
import os
from pathlib import Path

import pytest
import tensorflow as tf
from absl import flags

import keras_het

flags.FLAGS(["pytest"])
BUILT: list[list[str]] = []
OUTCOMES: dict[str, str] = {}


class CountedStrategy(keras_het.HeterogeneousStrategy):
    """Ours, with the first argument of the class that it replaces."""

    def __init__(self, devices=None):
        super().__init__(devices=devices)
        BUILT.append(list(devices or []))


@pytest.fixture(autouse=True)
def swapped_strategy(monkeypatch):
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", CountedStrategy)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[report.nodeid] = report.outcome


def pytest_sessionfinish():
    content = {"built": BUILT, "outcomes": OUTCOMES}
    Path(os.environ["SWAPPED_STRATEGY_REPORT"]).write_text(json.dumps(content))
