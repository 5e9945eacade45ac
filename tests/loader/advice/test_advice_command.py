"""`keras-het loader-advice` runs a script up to `fit` and looks at what it gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import pytest

from keras_het.launch.command_line import main
from keras_het.loader.advice.script import advise_script

REPOSITORY = Path(__file__).parents[3]
TIMEOUT = 110
pytestmark = pytest.mark.timeout(TIMEOUT + 10)
HEAD = """
import sys
import keras
import numpy as np
import tensorflow as tf
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
PIPELINE = """
def heavy(number):
    matrix = tf.fill([256, 256], tf.cast(number, tf.float32) * 1e-9)
    for _ in range(6):
        matrix = tf.matmul(matrix, matrix)
    return matrix[0, :4], matrix[0, :1]

dataset = tf.data.Dataset.range(80).map(heavy).batch(20)
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD + PIPELINE + textwrap.dedent(body))
    return path


@pytest.mark.full
def test_the_command_advises_and_trains_nothing(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import helper
        print("arguments", sys.argv[1:])
        try:
            model.fit(dataset, epochs=2)
        except Exception:
            print("caught")
        print("trained")
        """,
    )
    (tmp_path / "helper.py").write_text("print('a module beside it')\n")
    command = [sys.executable, "-m", "keras_het", "loader-advice", "--seconds", "0.2"]
    done = subprocess.run(
        [*command, str(path), "--epochs", "3"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arguments ['--epochs', '3']" in done.stdout
    assert "a module beside it" in done.stdout
    assert "map(heavy)" in done.stdout
    assert "cache()" in done.stdout
    assert "trained" not in done.stdout
    assert "caught" not in done.stdout


def test_fit_is_itself_again_afterwards(tmp_path: Path) -> None:
    before, arguments, path = keras.Model.fit, sys.argv, list(sys.path)
    report = advise_script(script(tmp_path, "model.fit(x=dataset)"), [], 0.1)
    assert report is not None
    assert "cacheable_prefix" in report.kinds
    assert keras.Model.fit is before
    assert (sys.argv, sys.path) == (arguments, path)


def test_what_a_strategy_distributes_is_looked_at(tmp_path: Path) -> None:
    body = """
    import keras_het
    strategy = keras_het.HeterogeneousStrategy(devices=["CPU:0"])
    with strategy.scope():
        model.fit(strategy.distribute(dataset.unbatch(), global_batch_size=20))
    """
    report = advise_script(script(tmp_path, body), [], 0.1)
    assert report is not None
    assert "cacheable_prefix" in report.kinds


FILES_FOR_A_WHILE = """
import contextlib, io, pathlib, tempfile

def read(name):
    number = tf.strings.to_number(tf.io.read_file(name))
    return heavy(number)

with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    for number in range(40):
        pathlib.Path(folder, str(number)).write_text(str(number))
    names = tf.data.Dataset.from_tensor_slices([f"{folder}/{number}" for number in range(40)])
    model.fit(names.map(read).batch(20))
"""


def test_what_the_script_removes_after_fit_is_there_while_it_is_measured(tmp_path, capsys) -> None:
    report = advise_script(script(tmp_path, FILES_FOR_A_WHILE), [], 0.1)
    assert report is not None
    assert "cacheable_prefix" in report.kinds
    assert "cache()" in capsys.readouterr().out


@pytest.mark.parametrize("repeat", ["", ".repeat()"], ids=["ends", "endless"])
def test_a_pipeline_that_fails_is_named(tmp_path: Path, capsys, repeat: str) -> None:
    body = f"""
    def broken(number):
        raise RuntimeError("no such sample")

    def load(number):
        return tf.ensure_shape(tf.numpy_function(broken, [number], tf.float32), [4])

    try:
        model.fit(tf.data.Dataset.range(8){repeat}.map(load).batch(2))
    except Exception:
        print("caught")
    """
    assert main(["loader-advice", "--seconds", "0.1", str(script(tmp_path, body))]) == 1
    shown = capsys.readouterr()
    assert "train.py gives to fit fails, so that it was not measured" in shown.err
    assert "no such sample" in shown.err
    assert "caught" not in shown.out


AFTERWARDS = {
    "raises": """
        try:
            model.fit(dataset)
        finally:
            raise OSError("nothing to clean up")
        """,
    "catches everything": """
        try:
            model.fit(dataset)
        except BaseException:
            pass
        model.fit(np.zeros((8, 4)))
        """,
}


@pytest.mark.quick("raises")
@pytest.mark.parametrize("body", AFTERWARDS.values(), ids=AFTERWARDS)
def test_what_the_script_does_afterwards_takes_no_findings_away(tmp_path, capsys, body) -> None:
    report = advise_script(script(tmp_path, body), [], 0.1)
    assert report is not None
    assert "cacheable_prefix" in report.kinds
    assert capsys.readouterr().err == ""


def test_an_error_of_the_look_itself_is_not_given_to_the_script(tmp_path, monkeypatch) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keras_het.loader.advice.script.advise", interrupted)
    body = """
    try:
        model.fit(dataset)
    except KeyboardInterrupt:
        print("caught")
    """
    with pytest.raises(KeyboardInterrupt):
        advise_script(script(tmp_path, body), [], 0.1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("model.fit(np.zeros((8, 4)), np.zeros((8, 1)))", "gives ndarray to fit"),
        ("model.evaluate(dataset, verbose=0)", "does not call model.fit"),
        ("sys.exit(3)", "ended with 3 before"),
    ],
)
def test_where_there_is_no_pipeline_it_says_so(tmp_path: Path, capsys, body, message) -> None:
    assert main(["loader-advice", str(script(tmp_path, body))]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("body", ['int("seven")', 'open("seven")', "1 / 0"])
def test_an_error_of_the_script_is_shown_where_it_was(tmp_path: Path, capsys, body) -> None:
    assert main(["loader-advice", str(script(tmp_path, body))]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert re.search(r'train.py", line \d+, in <module>', shown)
    assert "train.py ended in this error before it called model.fit." in shown


@pytest.mark.parametrize("name", ["nowhere.py", "long" * 2000])
def test_a_script_that_is_not_there_is_named(capsys, name) -> None:
    assert main(["loader-advice", name]) == 2
    assert f"there is no file '{name}'" in capsys.readouterr().err


def test_a_time_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["loader-advice", "--seconds", "0", "train.py"])
    assert "expected a positive number, received '0'" in capsys.readouterr().err
