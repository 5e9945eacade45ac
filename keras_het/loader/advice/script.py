"""Capture of the data set that a script gives to `fit`, and advice on it."""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

import keras
import tensorflow as tf

from keras_het.loader.advice.advice import AdviceReport
from keras_het.loader.advice.advise import advise
from keras_het.loader.input.global_order import GlobalOrderDataset


class _FitReached(BaseException):
    """Signal that ends the script; no `except Exception` of the script stops it."""


_Look = Callable[[object], AdviceReport | None]


@dataclasses.dataclass
class _Outcome:
    """Result of running the script.

    Args:
        is_reached: whether it called `fit`.
        report: the findings about the data set it passed.
        error: the error that ended the examination. The script must not catch it: it is not the
            script's own.
    """

    is_reached: bool = False
    report: AdviceReport | None = None
    error: BaseException | None = None


def advise_script(
    script: Path, arguments: Sequence[str], seconds: float = 0.5, step_seconds: float = 0.0
) -> AdviceReport | None:
    """Run a script up to its first `model.fit` and print advice on the data set given to it.

    The script runs in this process as `__main__`. It pauses in `fit` meanwhile: whatever its `with`
    and `finally` blocks remove still exists. Nothing after the call of `fit` runs, except those.

    Args:
        script: a Python file.
        arguments: its command line.
        seconds: see `advise`.
        step_seconds: see `advise`.

    Returns:
        The findings; None, and a line on the terminal, if `fit` was not called, received no
        `tf.data.Dataset`, or one that fails. An error of the script is printed too.
    """
    terminal = sys.stdout  # the script may redirect its own output

    def look(data: object) -> AdviceReport | None:
        return _look(data, script.name, seconds, step_seconds, terminal)

    outcome = _Outcome()
    said = _run_to_fit(script, arguments, look, outcome)
    if outcome.error is not None:
        raise outcome.error
    if not outcome.is_reached:
        _say(said)
    return outcome.report


def _look(
    given: object, script: str, seconds: float, step_seconds: float, terminal: IO[str]
) -> AdviceReport | None:
    data = _user_data(given)
    if not isinstance(data, tf.data.Dataset):
        _say(
            f"{script} gives {type(data).__name__} to fit, not a tf.data.Dataset: there is no "
            "pipeline to look at."
        )
        return None
    try:
        return advise(data, seconds, step_seconds, terminal)
    except tf.errors.OpError as error:
        _say(
            f"the data set that {script} gives to fit fails, so that it was not measured: "
            f"{type(error).__name__}: {error.message}"
        )
        return None


def _run_to_fit(
    script: Path,
    arguments: Sequence[str],
    look: _Look,
    outcome: _Outcome,
) -> str:
    """Run the script; return why it did not reach `fit`, if it did not."""
    try:
        with _as_main(script, arguments), _fit_intercepted(look, outcome):
            runpy.run_path(str(script), run_name="__main__")
    except _FitReached:
        pass
    except SystemExit as ended:
        return f"{script.name} ended with {ended.code!r} before it called model.fit."
    except Exception:  # a ValueError of the script is not a wrong use of the command
        if not outcome.is_reached:
            traceback.print_exc()
        return f"{script.name} ended in this error before it called model.fit."
    return (
        f"{script.name} does not call model.fit. In a loop of your own call "
        "keras_het.loader.advise(dataset)."
    )


def _user_data(data: object) -> object:
    if not isinstance(data, GlobalOrderDataset):
        return data
    dataset, batch_size = data._source
    return dataset if batch_size is None else dataset.batch(batch_size)


@contextlib.contextmanager
def _fit_intercepted(look: _Look, outcome: _Outcome) -> Iterator[None]:
    original = keras.Model.__dict__.get("fit")

    def fit(self: keras.Model, x: object = None, *arguments: object, **named: object) -> NoReturn:
        # a script that catches everything may get here again
        if not outcome.is_reached:
            outcome.is_reached = True
            try:
                outcome.report = look(x)
            except BaseException as error:
                outcome.error = error
        raise _FitReached

    keras.Model.fit = fit
    try:
        yield
    finally:
        if original is None:
            del keras.Model.fit
        else:
            keras.Model.fit = original


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, path


def _say(text: str) -> None:
    sys.stderr.write(f"[keras-het] {text}\n")
