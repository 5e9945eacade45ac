"""Takes the data set that a script gives to `fit`, and advises on it."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_het.loader.advice.advice import AdviceReport
from keras_het.loader.advice.advise import advise
from keras_het.loader.global_order import GlobalOrderDataset


class _FitReached(BaseException):
    """Ends the script; no `except Exception` of the script stops it."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data


def advise_script(
    script: Path, arguments: Sequence[str], seconds: float = 0.5, step_seconds: float = 0.0
) -> AdviceReport | None:
    """Runs a script up to its first `model.fit` and prints advice on the data set given to it.

    The script runs in this process as `__main__`; nothing after the call of `fit` does.

    Args:
        script: a Python file.
        arguments: its command line.
        seconds: see `advise`.
        step_seconds: see `advise`.

    Returns:
        The findings; None, and a line on the terminal, if `fit` was not called or got no
        `tf.data.Dataset`.
    """
    try:
        with _as_main(script, arguments), _fit_intercepted():
            runpy.run_path(str(script), run_name="__main__")
    except _FitReached as reached:
        data = _user_data(reached.data)
        if isinstance(data, tf.data.Dataset):
            return advise(data, seconds, step_seconds)
        _say(
            f"{script.name} gives {type(data).__name__} to fit, not a tf.data.Dataset: there is no "
            "pipeline to look at."
        )
        return None
    except SystemExit as ended:
        _say(f"{script.name} ended with {ended.code!r} before it called model.fit.")
        return None
    _say(
        f"{script.name} does not call model.fit. In a loop of your own call "
        "keras_het.loader.advise(dataset)."
    )
    return None


def _user_data(data: Any) -> Any:
    if not isinstance(data, GlobalOrderDataset):
        return data
    dataset, batch_size = data._source
    return dataset if batch_size is None else dataset.batch(batch_size)


@contextlib.contextmanager
def _fit_intercepted() -> Iterator[None]:
    original = keras.Model.__dict__.get("fit")

    def fit(self: Any, x: Any = None, *arguments: Any, **named: Any) -> Any:
        raise _FitReached(x)

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
