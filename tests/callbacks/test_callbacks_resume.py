"""Callbacks of a training that is killed and resumed end with what they have undisturbed.

One model is trained again and again, so that nothing is traced twice: first undisturbed; then, for
each moment, until a callback or the file system fails there, and once more from its backup.
"""

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from moments import EPOCH_END, EPOCHS, MOMENTS, STEPS
from remembering import (
    BATCH,
    VALIDATION,
    Asked,
    C,
    KillAt,
    KilledError,
    Own,
    X,
    Y,
    callbacks_in,
    drawn_model,
    fit,
    new_model,
    undisturbed_training,
)

from keras_het.callbacks import BackupAndRestore
from keras_het.fit import backup_folder
from keras_het.fit.callback_states import CallbackStates
from keras_het.strategy.cluster.stop_signals import stop_signals


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return drawn_model()


@pytest.fixture(scope="module")
def undisturbed(model: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed_training(model, tmp_path_factory.mktemp("undisturbed"))


QUICK = pytest.mark.quick("in an epoch-1-True-True", "end of an epoch-1-False-True")


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


@pytest.mark.quick("4")
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


HOOKS = [
    f"on_{part}_{end}"
    for part in ("epoch", "train_batch", "test", "test_batch")
    for end in ("begin", "end")
]


@pytest.mark.quick("on_train_batch_begin-True", "on_test_begin-False")
@pytest.mark.parametrize("is_backup_first", [True, False])
@pytest.mark.parametrize("hook", [*HOOKS, "on_train_end"])
def test_a_training_that_is_asked_to_stop_saves_after_its_step(
    model: keras.Model,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    hook: str,
    is_backup_first: bool,
) -> None:
    """As by SIGTERM, which could end the process of the tests."""
    number = {"on_epoch_begin": 3, "on_epoch_end": 2, "on_train_end": 1}.get(hook, 2 * STEPS + 2)
    number = 3 if "test" in hook else number
    asked: list[bool] = []

    def ask() -> None:
        if not asked:
            asked.append(stop_signals.ask(signal.SIGTERM))

    for stop in [KillAt(hook, number, ask)], []:
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1000)
        own = [*callbacks_in(tmp_path), *stop]
        own = [backup, *own] if is_backup_first else [*own, backup]
        if stop:
            with pytest.raises(SystemExit, match="143"):
                fit(model, tmp_path, own)
            assert asked == [True]
            assert hook == "on_train_end" or list((tmp_path / "backup").glob("backup-*"))
    assert fit(model, tmp_path, own) == undisturbed


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


KINDS_OF_TURNS = ["shuffled", "split", "generator", "own generator"]


def shared(kind: str = "in order") -> dict[str, Any]:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    shuffled = rows.shuffle(20, seed=3)
    endless = (batch for batch in itertools.repeat((X[:BATCH], Y[:BATCH])))
    sources: dict[str, Any] = {
        "in order": (rows.repeat().batch(BATCH),) * 2,
        "shuffled": (shuffled.repeat().batch(BATCH),) * 2,
        "split": [part.repeat().batch(BATCH) for part in (shuffled.skip(4), shuffled.take(4))],
        "generator": (endless := (batch for batch in itertools.repeat((X[:BATCH], Y[:BATCH]))),)
        * 2,
        "own generator": (rows.repeat().batch(BATCH), endless),
        "own shuffle": (rows.repeat().batch(BATCH), shuffled.batch(BATCH)),
    }
    x, validation = sources[kind]
    steps = {"steps_per_epoch": STEPS, "validation_steps": 2}
    return {"x": x, "validation_data": validation, **steps}


@pytest.mark.parametrize("kind", [*KINDS_OF_TURNS, "in order", "own shuffle"])
@pytest.mark.full
def test_a_source_whose_turns_no_backup_holds_is_named_once(
    model: keras.Model, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "keras_het"):
        fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup")], shared(kind), epochs=2)
    told = [each.message for each in caplog.records if "draw in turn" in each.message]
    assert len(told) == (kind in KINDS_OF_TURNS)
    source = "one generator" if "generator" in kind else "one shuffle"
    assert all(source in each and "Give validation_data" in each for each in told)


def validated_on(kind: str) -> dict[str, Any]:
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    shuffled = rows.shuffle(20, seed=5)
    kinds: dict[str, tuple[tf.data.Dataset, int | None]] = {
        "whole": (shuffled.batch(BATCH), None),
        "cut": (shuffled.batch(BATCH), 2),
        "cut at its end": (shuffled.batch(BATCH), 4),
        "repeated": (shuffled.repeat().batch(BATCH), 3),
        "after repeat": (rows.repeat().shuffle(20, seed=5).batch(BATCH), 3),
        "some": (shuffled.take(6).batch(BATCH), None),
        "below others": (shuffled.batch(2).unbatch().batch(BATCH), 2),
    }
    data, steps = kinds[kind]
    return {**data_set(), "validation_data": data, "validation_steps": steps}


KINDS = ["whole", "cut", "cut at its end", "repeated", "after repeat", "some", "below others"]


@pytest.mark.parametrize("moment", ["in an epoch", "end of an epoch", "in a validation"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_a_validation_with_an_order_of_its_own(
    model: keras.Model, tmp_path: Path, kind: str, moment: str
) -> None:
    expected = fit(model, tmp_path, [], validated_on(kind), epochs=4)
    for kill in [KillAt(*MOMENTS[moment])], []:
        callbacks = [BackupAndRestore(tmp_path / "backup", save_freq=1), *kill]
        if kill:
            with pytest.raises(KilledError):
                fit(model, tmp_path, callbacks, validated_on(kind), epochs=4)
    assert fit(model, tmp_path, callbacks, validated_on(kind), epochs=4) == expected


@pytest.mark.full
@pytest.mark.parametrize("data", [data_set, endless, of_unknown_length, shared])
@pytest.mark.parametrize("moment", ["in an epoch", "last step of an epoch", "in a validation"])
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


@pytest.mark.full
@pytest.mark.parametrize("moment", ["in an epoch", "begin of an epoch", "end of an epoch"])
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


@pytest.mark.full
def test_a_training_that_was_stopped_stays_stopped(model: keras.Model, tmp_path: Path) -> None:
    expected = fit(model, tmp_path, [StopIn()])
    assert expected["epochs"] == [0, 1]
    with pytest.raises(KilledError):
        backup = BackupAndRestore(tmp_path / "backup")
        fit(model, tmp_path, [StopIn(), backup, KillAt("on_train_end", 1)])
    backup = BackupAndRestore(tmp_path / "backup")
    assert fit(model, tmp_path, [StopIn(), backup]) == expected


@pytest.mark.full
def test_settings_come_from_the_new_script(model: keras.Model, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        backup = BackupAndRestore(tmp_path / "backup", save_freq=1)
        fit(model, tmp_path, [backup, Own(), KillAt(EPOCH_END, 2)])
    own = Own(unit="steps")
    fit(model, tmp_path, [BackupAndRestore(tmp_path / "backup", save_freq=1), own])
    assert own.unit == "steps" and own.count == STEPS * EPOCHS


@pytest.mark.full
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
