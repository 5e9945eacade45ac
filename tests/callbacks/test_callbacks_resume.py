"""Callbacks of a training that is killed and resumed end with what they have undisturbed.

One model is trained again and again, so that nothing is traced twice: first undisturbed; then, for
each moment, until a callback or the file system fails there, and once more from its backup.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruption import OfThisProcess

import keras_het
from keras_het.callbacks import BackupAndRestore
from keras_het.fit import backup_folder
from keras_het.fit.callback_states import CallbackStates

STEPS, EPOCHS, BATCH = 4, 5, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS * BATCH - 1, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + RNG.normal(size=(len(X), 1)).astype("float32")
VALIDATION = X[:5], -Y[:5]
C = keras.callbacks


class KilledError(Exception):
    pass


class KillAt(OfThisProcess):
    """Fails when one of its methods is called for the n-th time."""

    def __init__(self, method: str, number: int) -> None:
        super().__init__()
        calls = iter(range(number - 1))

        def fail(*_: Any, **__: Any) -> None:
            if next(calls, None) is None:
                raise KilledError

        setattr(self, method, fail)


@dataclasses.dataclass
class Tracker:
    """An object within a callback."""

    best: float = np.inf
    seen: list[float] = dataclasses.field(default_factory=list)


class Own(C.Callback):
    """A callback as users write it, with all kinds of attributes."""

    def __init__(self, unit: str = "epochs") -> None:
        super().__init__()
        self.unit = unit
        self.count, self.name, self.last = 0, "none", None
        self.losses: list[float] = []
        self.by_epoch: dict[int, tuple[float, ...]] = {}
        self.moments = np.zeros(3)
        self.recent: collections.deque[float] = collections.deque(maxlen=2)
        self.kinds: set[str] = set()
        self.tracker = Tracker()
        self.rng, self.random = np.random.default_rng(3), random.Random(4)
        self.draws: list[float] = []
        self.variable = tf.Variable(0.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        self.last = np.float32(batch)
        self.moments += [1, batch, batch**2]
        self.draws = [*self.draws, float(self.rng.normal()), self.random.random()]
        self.variable.assign_add(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = float(logs["loss"])
        self.losses.append(loss)
        self.by_epoch[epoch] = loss, float(logs["val_loss"])
        self.recent.append(loss)
        self.kinds.add("even" if epoch % 2 == 0 else "odd")
        self.name = f"epoch {epoch}"
        self.tracker.best = min(self.tracker.best, loss)
        self.tracker.seen.append(loss)


class Asked(C.Callback):
    """A callback that says itself what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self._total = threading.Lock(), 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with self.lock:
            self._total += float(logs["loss"])

    def get_state(self) -> dict[str, Any]:
        return {"total": self._total}

    def set_state(self, state: dict[str, Any]) -> None:
        self._total = state["total"]


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = new_model()
    # Keras draws an element of a data set for the first `fit` of a model, and for no later one.
    model.fit(X, Y, epochs=1, batch_size=BATCH, verbose=0, validation_data=VALIDATION)
    return model


def new_model(optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.3)) -> keras.Model:
    from devices import create_logical_devices

    create_logical_devices()
    strategy = keras_het.HeterogeneousStrategy(["CPU:0", "CPU:1"], shares=[3, 1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
        model.optimizer.build(model.trainable_variables)
    return model


def callbacks_in(folder: Path) -> list[C.Callback]:
    return [
        C.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        C.ModelCheckpoint(
            folder / "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
        ),
        C.ModelCheckpoint(
            folder / "{epoch}-{batch}.weights.h5", save_freq=3, save_weights_only=True
        ),
        C.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.3),
        C.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        C.CSVLogger(str(folder / "log.csv")),
        C.TensorBoard(str(folder / "board"), update_freq=2),
        C.TerminateOnNaN(),
        Own(),
        Asked(),
    ]


def fit(
    model: keras.Model,
    folder: Path,
    callbacks: list[C.Callback],
    data: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Trains a model as a new process would, and returns all that can be seen afterwards."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    model.optimizer.learning_rate.assign(0.3)
    data = data or {"x": X, "y": Y, "batch_size": BATCH, "validation_data": VALIDATION}
    history = model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
    return seen(model, folder, callbacks, history)


def seen(
    model: keras.Model, folder: Path, callbacks: list[C.Callback], history: C.History
) -> dict[str, Any]:
    own = next((each for each in callbacks if isinstance(each, Own)), None)
    asked = next((each for each in callbacks if isinstance(each, Asked)), None)
    files = sorted(path for path in folder.glob("*.weights.h5"))
    csv = folder / "log.csv"
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "optimizer": [np.asarray(each).tolist() for each in model.optimizer.variables],
        "history": history.history,
        "epochs": history.epoch,
        "rows": csv.read_text() if csv.exists() else None,
        "files": {path.name: contents(path) for path in files},
        "own": plain(own),
        "asked": None if asked is None else asked.get_state(),
    }


def plain(own: Own | None) -> dict[str, Any] | None:
    if own is None:
        return None
    kept = {n: v for n, v in vars(own).items() if n not in ("_model", "params", "rng", "random")}
    kept.update(moments=own.moments.tolist(), variable=float(own.variable.numpy()))
    kept.update(next_draws=(float(own.rng.normal()), own.random.random()))
    return kept


def contents(path: Path) -> str:
    import h5py

    found = hashlib.sha256()
    with h5py.File(path) as file:
        file.visititems(
            lambda name, each: found.update(each[()].tobytes()) if hasattr(each, "dtype") else None
        )
    return found.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(model: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    found = fit(model, folder, callbacks_in(folder))
    assert len(found["epochs"]) < EPOCHS or EPOCHS == 5
    assert len(found["files"]) >= 5
    return found


BATCH_END, EPOCH_END = "on_train_batch_end", "on_epoch_end"
MOMENTS = {
    "first step": (BATCH_END, 1),
    "in the first epoch": (BATCH_END, 3),
    "in an epoch": (BATCH_END, 2 * STEPS + 2),
    "last step of an epoch": (BATCH_END, 2 * STEPS),
    "begin of an epoch": ("on_epoch_begin", 3),
    "end of an epoch": (EPOCH_END, 2),
    "end of the last epoch": (EPOCH_END, EPOCHS),
    "begin of a validation": ("on_test_begin", 2),
    "in a validation": ("on_test_batch_end", 3),
    "end of a validation": ("on_test_end", 3),
}
QUICK = pytest.mark.quick(
    "in an epoch-1-True-True", "in a validation-1-True-True", "end of an epoch-1-False-True"
)


@QUICK
@pytest.mark.parametrize("is_backup_first", [True, False])
@pytest.mark.parametrize("is_killed_last", [True, False])
@pytest.mark.parametrize("save_freq", [1, 3, "epoch"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_training_ends_as_one_that_was_not(
    model: keras.Model,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    moment: str,
    save_freq: int | str,
    is_killed_last: bool,
    is_backup_first: bool,
) -> None:
    def callbacks(*kill: C.Callback) -> list[C.Callback]:
        backup = BackupAndRestore(tmp_path / "backup", save_freq=save_freq)
        own = callbacks_in(tmp_path)
        own = [*own, *kill] if is_killed_last else [*kill, *own]
        return [backup, *own] if is_backup_first else [*own, backup]

    with pytest.raises(KilledError):
        fit(model, tmp_path, callbacks(KillAt(*MOMENTS[moment])))
    assert fit(model, tmp_path, callbacks()) == undisturbed


@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_training_killed_while_it_saves(
    model: keras.Model,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(number - 1))

    def fail(path: Path) -> None:
        if next(calls, None) is None:
            raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(backup_folder, "_to_disk", fail)
        backup = BackupAndRestore(tmp_path / "backup", save_freq=2)
        fit(model, tmp_path, [backup, *callbacks_in(tmp_path)])
    backup = BackupAndRestore(tmp_path / "backup", save_freq=2)
    assert fit(model, tmp_path, [backup, *callbacks_in(tmp_path)]) == undisturbed


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
    guard = model.distribute_strategy._stop_request.guard
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

    def _count(self, name: str, number: Any = None, *_: Any, **__: Any) -> None:
        # in the rest of an epoch, Keras begins one more step to find that the data has ended
        self.calls[name] += name != "on_train_batch_begin" or number < STEPS


@pytest.mark.quick("on_epoch_end-False-True", "on_test_batch_end-True-True")
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
    assert waits.calls == counts[0].calls.get(hook, 2) + (hook == "on_train_batch_begin")
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
        guard, end = self._model.distribute_strategy._stop_request.guard, time.monotonic() + 60
        steps = (self._passes - 1) * STEPS + step
        while not guard._is_waiting or guard.num_trained < steps:
            assert time.monotonic() < end
            time.sleep(0.001)
        save_in_another_thread(self._model)


@pytest.mark.parametrize("row", [0, 9, 14])
@pytest.mark.quick("0")
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


def data_set() -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=3).batch(BATCH)
    return {"x": data, "validation_data": tf.data.Dataset.from_tensors(VALIDATION)}


def endless() -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=3).repeat().batch(BATCH)
    validation = tf.data.Dataset.from_tensors(VALIDATION)
    return {"x": data, "steps_per_epoch": STEPS, "validation_data": validation}


def of_unknown_length() -> dict[str, Any]:
    data = data_set()
    return {**data, "x": data["x"].filter(lambda *_: True)}


def shared(kind: str = "in order") -> dict[str, Any]:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    shuffled = rows.shuffle(20, seed=3)
    sources: dict[str, Any] = {
        "in order": (rows.repeat().batch(BATCH),) * 2,
        "shuffled": (shuffled.repeat().batch(BATCH),) * 2,
        "split": [part.repeat().batch(BATCH) for part in (shuffled.skip(4), shuffled.take(4))],
        "generator": ((batch for batch in itertools.repeat((X[:BATCH], Y[:BATCH]))),) * 2,
    }
    x, validation = sources[kind]
    steps = {"steps_per_epoch": STEPS, "validation_steps": 2}
    return {"x": x, "validation_data": validation, **steps}


@pytest.mark.parametrize("kind", ["in order", "shuffled", "split", "generator"])
@pytest.mark.quick("shuffled")
def test_a_source_whose_turns_no_backup_holds_is_named_once(
    model: keras.Model, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "keras_het"):
        fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup")], shared(kind), epochs=2)
    told = [each.message for each in caplog.records if "draw in turn" in each.message]
    assert len(told) == (kind != "in order")
    source = "one generator" if kind == "generator" else "one shuffle"
    assert all(source in each and "Give validation_data" in each for each in told)


@pytest.mark.parametrize("data", [data_set, endless, of_unknown_length, shared])
@pytest.mark.parametrize("moment", ["in an epoch", "last step of an epoch", "in a validation"])
@pytest.mark.quick("in an epoch-data_set")
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_other_data(
    model: keras.Model, tmp_path: Path, moment: str, data: Callable[[], dict[str, Any]]
) -> None:
    (tmp_path / "undisturbed").mkdir()
    callbacks = callbacks_in(tmp_path / "undisturbed")
    expected = fit(model, tmp_path / "undisturbed", callbacks, data(), epochs=3)
    for kill in [KillAt(*MOMENTS[moment])], []:
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
        callbacks = [backup, *callbacks_in(tmp_path), *kill]
        if kill:
            with pytest.raises(KilledError):
                fit(model, tmp_path, callbacks, data(), epochs=3)
        else:
            assert fit(model, tmp_path, callbacks, data(), epochs=3) == expected


@pytest.mark.parametrize("moment", ["in an epoch", "begin of an epoch", "end of an epoch"])
@pytest.mark.quick("begin of an epoch")
def test_swapped_averages(tmp_path: Path, moment: str) -> None:
    averaged = new_model(lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5))
    expected = fit(averaged, tmp_path, [C.SwapEMAWeights(swap_on_epoch=True)])
    with pytest.raises(KilledError):
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
        swap = C.SwapEMAWeights(swap_on_epoch=True)
        fit(averaged, tmp_path, [swap, backup, KillAt(*MOMENTS[moment])])
    backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
    assert fit(averaged, tmp_path, [C.SwapEMAWeights(swap_on_epoch=True), backup]) == expected


class StopIn(C.Callback):
    """Ends the training in its second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1


def test_a_training_that_was_stopped_stays_stopped(model: keras.Model, tmp_path: Path) -> None:
    expected = fit(model, tmp_path, [StopIn()])
    assert expected["epochs"] == [0, 1]
    with pytest.raises(KilledError):
        backup = BackupAndRestore(tmp_path / "backup")
        fit(model, tmp_path, [StopIn(), backup, KillAt("on_train_end", 1)])
    backup = BackupAndRestore(tmp_path / "backup")
    assert fit(model, tmp_path, [StopIn(), backup]) == expected


class StopInAnEpoch(C.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model.optimizer.iterations == STEPS + 2


@pytest.mark.parametrize("has_stopped", [True, False])
@pytest.mark.quick("True")
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


def test_settings_are_those_of_the_new_script(model: keras.Model, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
        fit(model, tmp_path, [backup, Own(), KillAt(EPOCH_END, 2)])
    own = Own(unit="steps")
    fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup", save_freq=1), own])
    assert own.unit == "steps" and own.count == STEPS * EPOCHS


def test_containers_that_others_hold_are_filled(model: keras.Model, tmp_path: Path) -> None:
    for kill in [KillAt(EPOCH_END, 2)], []:
        own = Own()
        losses, by_epoch = own.losses, own.by_epoch
        callbacks = [BackupAndRestore(tmp_path / "backup", save_freq=1), own, *kill]
        if kill:
            with pytest.raises(KilledError):
                fit(model, tmp_path, callbacks)
        else:
            fit(model, tmp_path, callbacks)
    assert losses is own.losses and len(losses) == EPOCHS
    assert by_epoch is own.by_epoch and sorted(by_epoch) == list(range(EPOCHS))


def test_what_has_another_kind_now_is_left_as_it_is() -> None:
    own = Own()
    states = CallbackStates([own])
    own.tracker.best, own.draws = 0.5, [own.rng.normal()]
    again = Own()
    resumed = CallbackStates([again])
    again.tracker, again.rng = None, None
    resumed.restore(states.export({}))
    assert again.tracker is None and again.rng is None and again.draws == own.draws


class WithAnEvent(C.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.event, self.path, self.layer = threading.Event(), Path(), keras.layers.Dense(1)


def test_what_cannot_be_kept_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "keras_het"):
        states = CallbackStates([WithAnEvent(), Own()])
        states.export({})
        states.export({})
    (record,) = caplog.records
    assert "what WithAnEvent remembers in event (Event)." in record.message
    assert "get_state()" in record.message and "set_state(state)" in record.message


def test_callbacks_of_the_interrupted_training_that_are_missing_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = Own()
    states = CallbackStates([own])
    own.count = 3
    with caplog.at_level(logging.WARNING, "keras_het"):
        CallbackStates([Asked()]).restore(states.export({}))
    (record,) = caplog.records
    assert "does not have: Own." in record.message


@pytest.fixture(autouse=True)
def no_rest_of_an_epoch(model: keras.Model) -> Iterator[None]:
    yield
    assert "_get_metrics_result_or_logs" not in vars(model)
