"""One call of a model's `fit`, `evaluate` or `predict`, and the layers around its steps."""

from __future__ import annotations

import contextlib
import enum
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar

import keras

from keras_het.value_types import Nest

Batches = Iterator[Nest] | list[Nest]
"""Argument of a step of Keras."""
StepFunction = Callable[[Batches], Nest]
"""Runs one execution of Keras."""
Layer = Callable[[StepFunction, Batches], Nest]
"""Takes the rest of a step and its argument, and returns its result."""

STEP_FUNCTIONS = {
    "fit": "train_function",
    "evaluate": "test_function",
    "predict": "predict_function",
}
"""The attribute of a model that holds the step function of each loop."""
_running: weakref.WeakKeyDictionary[keras.Model, list[FitSession]] = weakref.WeakKeyDictionary()


class Rank(enum.IntEnum):
    """The order of the layers around a step, the outermost first."""

    KEEP_LOGS = 0
    END_IF_ASKED = 1
    VALIDATE_DATA = 2
    TUNE_LOADER = 3
    COUNT_SAMPLES = 4
    NOTE_MEMORY = 5
    REDUCE_LOCALLY = 6
    SAMPLE_STEPS = 7


# Its layers surround its own steps only; a validation or a callback's own `fit` is another session.
class FitSession:
    """A call of a model's `fit`, `evaluate` or `predict`, or of one of its steps on a batch."""

    def __init__(
        self, model: keras.Model, loop: str, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        self.model, self.loop, self.callbacks = model, loop, list(callbacks)
        self.is_in_step = self.is_over = False
        self.error: BaseException | None = None
        self._layers: dict[Rank, Layer] = {}
        self._ends = contextlib.ExitStack()
        self._before_inner: list[Callable[[FitSession], None]] = []
        self._before_callbacks: dict[str, list[Callable[..., None]]] = {}
        self._changes: list[tuple[str, str]] = []
        self._on_change: list[Callable[[str, str], None]] = []
        self._layered: _LayeredStep | None = None

    @staticmethod
    def of(model: keras.Model | None) -> FitSession | None:
        """Return the innermost running session of a model."""
        sessions = _running.get(model)
        return sessions[-1] if sessions else None

    def add_layer(self, rank: Rank, layer: Layer) -> None:
        """Put a layer around the steps from the next one on, at the position of its rank."""
        self._layers[rank] = layer

    def has_layer(self, rank: Rank) -> bool:
        return rank in self._layers

    def remove_layer(self, rank: Rank) -> None:
        self._layers.pop(rank, None)

    def on_end(self, function: Callable[[], object]) -> None:
        """Call a function when the session ends, however it ends; the last one added runs first."""
        self._ends.callback(function)

    def before_inner(self, function: Callable[[FitSession], None]) -> None:
        """Call a function when a session of the same model begins within this one."""
        self._before_inner.append(function)

    def before_callbacks(self, method: str, function: Callable[..., None]) -> None:
        """Call a function before a method of all user callbacks."""
        self._before_callbacks.setdefault(method, []).append(function)

    def on_change(self, function: Callable[[str, str], None]) -> None:
        """Call a function with each change to the running training, also with those before."""
        for change in self._changes:
            function(*change)
        self._on_change.append(function)

    def note_change(self, kind: str, text: str) -> None:
        """Let others know of a change to the running training."""
        self._changes.append((kind, text))
        for function in self._on_change:
            function(kind, text)

    def tell(self, method: str, *args: object) -> None:
        """Call the functions that precede a method of the user's callbacks."""
        for function in self._before_callbacks.get(method, ()):
            function(*args)

    def step_function(self, function: StepFunction) -> StepFunction:
        if not self._layers:
            return function
        if self._layered is None or self._layered.function is not function:
            self._layered = _LayeredStep(self, function)
        return self._layered

    def run_step(self, function: StepFunction, batches: Batches) -> Nest:
        """Run a step within the layers, unless it is within them already."""
        if self.is_in_step or self.is_over:
            return function(batches)
        for rank in sorted(self._layers, reverse=True):
            function = functools.partial(self._layers[rank], function)
        self.is_in_step = True
        try:
            return function(batches)
        finally:
            self.is_in_step = False

    def __enter__(self) -> FitSession:
        sessions = _running.setdefault(self.model, [])
        if sessions:
            for function in sessions[-1]._before_inner:
                function(self)
        sessions.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_over, self.error = True, error
        try:
            self._ends.__exit__(kind, error, traceback)
        finally:
            _running[self.model].remove(self)
            self._layers.clear()
            self._layered = self.error = None


class _LayeredStep:
    """A model's step function in a session that has layers."""

    __slots__ = ("__weakref__", "_session", "function")

    def __init__(self, session: FitSession, function: StepFunction) -> None:
        self._session, self.function = session, function

    def __call__(self, batches: Batches) -> Nest:
        return self._session.run_step(self.function, batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def step_property(loop: str) -> property:
    """Return a model's step function, with the layers if a session of that loop requests them."""
    # Keras reads it before each step, so it does not matter which code sets it, or when.
    attribute = STEP_FUNCTIONS[loop]

    def read(model: keras.Model) -> StepFunction | None:
        function = vars(model).get(attribute)
        session = FitSession.of(model)
        if function is None or session is None or session.loop != loop:
            return function
        return session.step_function(function)

    def write(model: keras.Model, function: StepFunction | None) -> None:
        if isinstance(function, _LayeredStep):  # read within a session and put back
            function = function.function
        vars(model)[attribute] = function

    return property(read, write)


# The end of an epoch reaches one callback after the other. Keras appends its History to the user's
# callbacks, so that one knows when a step is over; a subclass may have any position.
class BatchEnds:
    """Record of the time at which the last callback of a `fit` has seen the end of a batch."""

    def __init__(self, model: keras.Model) -> None:
        history = getattr(model, "history", None)
        self._history = history if type(history) is keras.callbacks.History else None
        self._last = (-1, 0.0)
        if self._history is not None:
            self._history.on_train_batch_end = self._note

    def begin_epoch(self) -> None:
        self._last = (-1, 0.0)

    def time_of(self, batch: int) -> float | None:
        """Return when a batch was over, in seconds of `time.perf_counter`; None if unknown."""
        number, seconds = self._last
        return seconds if number >= batch else None

    def release(self) -> None:
        if self._history is not None:
            vars(self._history).pop("on_train_batch_end", None)

    def _note(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras may call this in another thread, and late
        self._last = batch, time.perf_counter()


# Keras assumes that all epochs have as many steps as its data has batches, or as the first epoch.
# Several callbacks may expect fewer at the same time, and end in any order.
class ShorterEpochs:
    """Suppression of Keras's warning that data ran out while at least one object expects that."""

    _expecting: ClassVar[list[ShorterEpochs]] = []
    _quiet = contextlib.ExitStack()

    def expect(self) -> None:
        """Expect shorter epochs from now on, until `end`; idempotent."""
        if self in self._expecting:
            return
        if not self._expecting:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        self._expecting.append(self)

    def end(self) -> bool:
        """Restore the warnings; return whether shorter epochs were expected."""
        if self not in self._expecting:
            return False
        self._expecting.remove(self)
        if not self._expecting:
            self._quiet.close()
        return True
