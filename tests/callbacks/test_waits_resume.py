"""A training that another thread saves while a callback or the data wait resumes undisturbed.

That is what happens if SIGTERM comes then: the main thread has no part in it.
"""

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from moments import EPOCHS, STEPS
from remembering import (
    BATCH,
    VALIDATION,
    C,
    KilledError,
    X,
    Y,
    callbacks_in,
    drawn_model,
    fit,
    undisturbed_training,
)

from keras_het.callbacks import BackupAndRestore


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return drawn_model()


@pytest.fixture(scope="module")
def undisturbed(model: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed_training(model, tmp_path_factory.mktemp("undisturbed"))


class Waits(C.Callback):
    """Waits in one of its calls until another thread has saved, as after SIGTERM, and ends."""

    def __init__(self, method: str, number: int | None) -> None:
        super().__init__()
        self.calls, self._number = 0, number
        setattr(self, method, self._wait)

    def _wait(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        if self.calls == self._number:
            save_in_another_thread(self.model)
            raise KilledError


def save_in_another_thread(model: keras.Model) -> None:
    guard = model.distribute_strategy.extended.stop_request.guard
    thread = threading.Thread(target=lambda: saved.append(guard.save_last_step(time.monotonic())))
    saved: list[bool] = []
    thread.start()
    thread.join(60)
    assert saved == [True]


HOOKS = [
    f"on_{part}_{end}"
    for part in ("epoch", "train_batch", "test", "test_batch")
    for end in ("begin", "end")
]


class Counts(C.Callback):
    """Counts how often each of its methods was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = dict.fromkeys(HOOKS, 0)
        for name in HOOKS:
            setattr(self, name, functools.partial(self._count, name))

    def _count(self, name: str, *_: Any, **__: Any) -> None:
        self.calls[name] += 1


@pytest.mark.quick("on_train_batch_begin-True-True")
@pytest.mark.parametrize("is_backup_first", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("hook", [*HOOKS, "on_train_end"])
def test_a_callback_that_waits_while_another_thread_saves(
    model: keras.Model,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    hook: str,
    is_last: bool,
    is_backup_first: bool,
) -> None:
    number = {"on_epoch_begin": 3, "on_epoch_end": 2, "on_train_end": 1}.get(hook, 2 * STEPS + 2)
    number = 3 if "test" in hook else number
    for ends_at in number, None:
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1000)
        own, counts, waits = callbacks_in(tmp_path), [Counts(), Counts()], Waits(hook, ends_at)
        own = [*own, waits] if is_last else [waits, *own]
        own = [counts[0], *own, counts[1]]
        own = [backup, *own] if is_backup_first else [*own, backup]
        if ends_at is not None:
            with pytest.raises(KilledError):
                fit(model, tmp_path, own)
    assert fit(model, tmp_path, own) == undisturbed
    assert waits.calls == counts[0].calls.get(hook, 2)
    steps = EPOCHS * STEPS
    numbers = [EPOCHS, EPOCHS, steps, steps, EPOCHS, EPOCHS, 2 * EPOCHS, 2 * EPOCHS]
    assert [each.calls for each in counts] == [dict(zip(HOOKS, numbers, strict=True))] * 2


class Slow:
    """Rows of which one never comes: meanwhile another thread saves, and the training ends."""

    def __init__(self, model: keras.Model, waits_at: tuple[int, int] | None) -> None:
        self._model, self._waits_at, self._passes = model, waits_at, 0

    def data(self) -> dict[str, Any]:
        specs = tuple(tf.TensorSpec(each.shape[1:], each.dtype) for each in (X, Y))
        rows = tf.data.Dataset.from_generator(self._rows, output_signature=specs)
        return {"x": rows.batch(BATCH), "validation_data": tf.data.Dataset.from_tensors(VALIDATION)}

    def _rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self._passes += 1
        for number, row in enumerate(zip(X, Y, strict=True)):
            if (self._passes, number) == self._waits_at:
                self._wait(number // BATCH)
                raise KilledError
            yield row

    def _wait(self, step: int) -> None:
        guard = self._model.distribute_strategy.extended.stop_request.guard
        end = time.monotonic() + 60
        steps = (self._passes - 1) * STEPS + step
        while not guard._is_waiting or guard.num_trained < steps:
            assert time.monotonic() < end
            time.sleep(0.001)
        save_in_another_thread(self._model)


@pytest.mark.full
@pytest.mark.parametrize("row", [0, 9, 14])
def test_a_step_that_waits_for_its_data_while_another_thread_saves(
    model: keras.Model, tmp_path: Path, row: int
) -> None:
    (tmp_path / "undisturbed").mkdir()
    callbacks = [*callbacks_in(tmp_path / "undisturbed"), before := Counts()]
    expected = fit(model, tmp_path / "undisturbed", callbacks, Slow(model, None).data())
    for waits_at in (3, row), None:
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1000)
        callbacks = [*callbacks_in(tmp_path), counts := Counts(), backup]
        data = Slow(model, waits_at).data()
        if waits_at is not None:
            with pytest.raises(Exception, match="KilledError"):
                fit(model, tmp_path, callbacks, data)
    assert fit(model, tmp_path, callbacks, data) == expected
    assert counts.calls == before.calls


@pytest.mark.full
@pytest.mark.parametrize("is_size_known", [True, False])
def test_a_validation_that_is_yet_to_begin_while_another_thread_saves(
    model: keras.Model, tmp_path: Path, is_size_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data() -> dict[str, Any]:
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=3)
        rows = rows if is_size_known else rows.filter(lambda *_: True)
        return {"x": rows.batch(BATCH), "validation_data": tf.data.Dataset.from_tensors(VALIDATION)}

    def wait(*_: Any, **__: Any) -> None:
        save_in_another_thread(model)
        raise KilledError

    def wait_once(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            patch.setattr(model, "evaluate", wait)

    expected = fit(model, tmp_path, [], data(), epochs=4)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        waits = C.LambdaCallback(on_epoch_begin=wait_once)
        fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup"), waits], data(), epochs=4)
    assert (
        fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup")], data(), epochs=4) == expected
    )


class StopInAnEpoch(C.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model.optimizer.iterations == STEPS + 2


@pytest.mark.full
@pytest.mark.parametrize("has_stopped", [True, False])
def test_a_training_that_stops_where_another_thread_saves(
    model: keras.Model, tmp_path: Path, has_stopped: bool
) -> None:
    expected = fit(model, tmp_path, [StopInAnEpoch()])
    assert expected["epochs"] == [0, 1]
    for waits_at in STEPS + 2, None:
        own = [StopInAnEpoch(), Waits("on_train_batch_end", waits_at)]
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1000)
        callbacks = [backup, *(own if has_stopped else reversed(own))]
        if waits_at is not None:
            with pytest.raises(KilledError):
                fit(model, tmp_path, callbacks)
    assert fit(model, tmp_path, callbacks) == expected
