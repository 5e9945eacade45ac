"""A part whose private symbol another version has moved says so at its use, and breaks no other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
# Pipelines alone need these; their adapter reads nothing else that is private.
OF_PIPELINES = "keras_het/keras_graphs_adapter.py"
PROGRAM = """
import importlib, sys
import keras, numpy as np

for path in sys.argv[2:]:
    module, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
        sys.modules[path] = None
    except ModuleNotFoundError:
        pass
    delattr(importlib.import_module(module), name)

import keras_het
import keras_het.loader, keras_het.planning, keras_het.launch.command_line, keras_het.summation
import keras_het.tensorboard.plugin

for name in keras_het.callbacks.__all__:
    getattr(keras_het.callbacks, name)
strategy = keras_het.HeterogeneousStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones([8, 2])
telemetry = keras_het.callbacks.Telemetry(sys.argv[1])
model.fit(x, x[:, :1], batch_size=1, verbose=0, callbacks=[telemetry])
try:
    keras_het.PipelineStrategy
except ImportError as error:
    print("refused:", error)
"""


def private_imports(file: Path) -> list[str]:
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("keras.src", "tensorflow.python"))
        for alias in node.names
    ]


@pytest.mark.full
def test_what_a_version_has_moved_breaks_the_parts_alone_that_need_it(tmp_path: Path) -> None:
    missing = private_imports(REPOSITORY / OF_PIPELINES)
    assert len(missing) > 3
    run = [sys.executable, "-c", PROGRAM, str(tmp_path), *missing]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("refused: "))
    assert "PipelineStrategy uses a private symbol that this version" in told
    assert "Received: Keras" in told
    assert list(tmp_path.iterdir()), "Telemetry wrote nothing"
