"""Backups of an elastic training: in memory and on disk, as often as they are worth it."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from interruption import Interruption
from small_training import NUM_BATCHES, data, flat, make_model

import keras_het
from keras_het.callbacks import ElasticBackup, elastic_backup
from keras_het.fit.backup_folder import RUN, BackupFolder, memory_folder, remove_memory_folders
from keras_het.fit.session import ShorterEpochs

EPOCHS = 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The name of a run in whose memory folders a test writes."""
    names = []

    def begin(name: str) -> str:
        elastic_backup._used_folders.clear()  # as in the processes of another group
        names.append(f"test-{os.getpid()}-{tmp_path.name}-{name}")
        monkeypatch.setenv(RUN, names[-1])
        return names[-1]

    yield begin
    for name in names:
        remove_memory_folders(name)


def fit(folder: Path, interrupted_at: int | None = None, **options: Any) -> keras.Model:
    model = make_model(keras_het.HeterogeneousStrategy())
    callbacks = [ElasticBackup(str(folder), **{"save_freq": 2, **options})]
    if interrupted_at is None:
        model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    else:
        with pytest.raises(InterruptedError):
            model.fit(
                data(),
                epochs=EPOCHS,
                verbose=0,
                callbacks=[*callbacks, Interruption(interrupted_at)],
            )
    return model


@functools.cache
def undisturbed() -> keras.Model:
    model = make_model(keras_het.HeterogeneousStrategy())
    model.fit(data(), epochs=EPOCHS, verbose=0)
    return model


def expected() -> np.ndarray:
    return flat(undisturbed())


def backups(folder: Path) -> list[Path]:
    return sorted(folder.glob("backup-*")) if folder.exists() else []


def test_a_run_continues_from_memory_when_the_disk_is_lost(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, folder = run("a"), tmp_path / "backup"
    fit(folder, interrupted_at=9)
    (on_disk,), (in_memory,) = backups(folder), backups(memory_folder(name, folder))
    assert on_disk.read_bytes() == in_memory.read_bytes()
    on_disk.unlink()
    with caplog.at_level("INFO", "keras_het"):
        model = fit(folder)
    assert f"Training continues from {in_memory} at epoch 2, step 3." in caplog.text
    np.testing.assert_array_equal(flat(model), expected())
    assert model.history.history == undisturbed().history.history


@pytest.mark.full
def test_another_run_looks_at_the_disk_only(run: Any, tmp_path: Path) -> None:
    folder, other = tmp_path / "backup", tmp_path / "other"
    fit_in = run("a")
    fit(folder, interrupted_at=9)
    fit(other, interrupted_at=9)
    for path in backups(folder):
        path.unlink()
    run("b")
    fit(folder, interrupted_at=3)
    (path,) = backups(folder)
    assert path.name.startswith("backup-1-")
    assert not memory_folder(fit_in, folder).exists()
    assert backups(memory_folder(fit_in, other))


@pytest.mark.full
def test_the_newer_of_disk_and_memory_wins(run: Any, tmp_path: Path) -> None:
    name, folder = run("a"), tmp_path / "backup"
    fit(folder, interrupted_at=9)
    (newer,) = backups(folder)
    kept = newer.read_bytes()
    newer.unlink()
    remove_memory_folders(name)
    fit(folder, interrupted_at=3)
    for path in backups(folder):
        path.unlink()
    (folder / newer.name).write_bytes(kept)
    model = fit(folder)
    np.testing.assert_array_equal(flat(model), expected())


@pytest.mark.full
def test_another_trainings_backup_is_left_alone(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, fit_in = tmp_path / "backup", run("a")
    fit(folder, interrupted_at=9)
    (of_another,) = backups(folder)
    kept = of_another.read_bytes()
    of_another.unlink()
    remove_memory_folders(fit_in)
    run("b")
    fit(folder, interrupted_at=3)
    for path in backups(folder):
        path.unlink()
    of_another.write_bytes(kept)  # more steps, on the disk of a machine that joins
    with caplog.at_level("INFO", "keras_het"):
        model = fit(folder)
    assert f"Ignored: {of_another}, which belongs to another training." in caplog.text
    assert "Training continues from" in caplog.text and "at epoch 1, step 3." in caplog.text
    assert of_another.read_bytes() == kept
    np.testing.assert_array_equal(flat(model), expected())


@pytest.mark.full
def test_a_finished_fit_is_not_trained_again_by_the_same_run(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    run("a")
    np.testing.assert_array_equal(flat(fit(folder)), expected())
    elastic_backup._used_folders.clear()
    again = fit(folder, save_freq=1)
    np.testing.assert_array_equal(flat(again), expected())
    assert int(np.array(again.optimizer.iterations)) == EPOCHS * NUM_BATCHES


@pytest.mark.full
def test_a_fit_that_ended_early_is_not_trained_on(run: Any, tmp_path: Path) -> None:
    run("a")
    saved: list[tuple[str, int, int]] = []
    elastic_backup.when_saved(lambda *place: saved.append(place))

    def ended_early() -> keras.Model:
        elastic_backup._used_folders.clear()
        model = make_model(keras_het.HeterogeneousStrategy())
        end = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
        )
        callbacks = [ElasticBackup(str(tmp_path / "backup"), save_freq=2), end]
        model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return model

    first, again = ended_early(), ended_early()
    elastic_backup._listeners.pop()
    with pytest.raises(ValueError, match="An earlier fit of this script has used this backup_dir"):
        fit(tmp_path / "backup")  # in the same process
    assert int(np.array(again.optimizer.iterations)) == NUM_BATCHES
    np.testing.assert_array_equal(flat(again), flat(first))
    places = [(0, 2), (0, 4), (0, 6), (EPOCHS, 0), (EPOCHS, 0)]
    assert saved == [(str(tmp_path / "backup"), *place) for place in places]


@pytest.mark.full
@pytest.mark.parametrize("keeps_two", [False, True])
def test_the_next_run_starts_from_its_own(run: Any, tmp_path: Path, keeps_two: bool) -> None:
    folder = tmp_path / "backup"
    run("a")
    fit(folder)
    last = int(backups(folder)[-1].name.split("-")[1])
    run("b")
    fit(folder, interrupted_at=3, double_checkpoint=keeps_two)
    assert int(backups(folder)[-1].name.split("-")[1]) > last
    run("c")  # continues from the second run, not from the end of the first one
    model = fit(folder)
    np.testing.assert_array_equal(flat(model), expected())


@pytest.mark.full
def test_without_an_engine_it_is_a_backup_and_restore(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    fit(folder, interrupted_at=9)
    model = fit(folder)
    np.testing.assert_array_equal(flat(model), expected())
    assert not backups(folder)
    assert not memory_folder("", folder).exists()


@pytest.mark.full
def test_memory_without_room_is_said_and_done_without(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run("a")
    add = BackupFolder.add

    def add_without_room(self: BackupFolder, *arguments: Any) -> bool:
        if self.path != tmp_path / "backup":
            raise OSError("No space left on device")
        return add(self, *arguments)

    monkeypatch.setattr(BackupFolder, "add", add_without_room)
    fit(tmp_path / "backup", interrupted_at=9)
    assert len(backups(tmp_path / "backup")) == 1
    assert caplog.text.count("This machine keeps no backup in memory.") == 1
    np.testing.assert_array_equal(flat(fit(tmp_path / "backup")), expected())


@pytest.mark.full
def test_a_damaged_backup_without_another_is_an_error(run: Any, tmp_path: Path) -> None:
    name = run("a")
    fit(tmp_path / "backup", interrupted_at=9)
    remove_memory_folders(name)
    (path,) = backups(tmp_path / "backup")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    model = make_model(keras_het.HeterogeneousStrategy())
    with pytest.raises(OSError, match="The backup is damaged, and there is no other"):
        model.fit(data(), verbose=0, callbacks=[ElasticBackup(str(tmp_path / "backup"))])


@pytest.mark.full
def test_a_damaged_copy_beside_an_intact_one_is_no_error(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("a")
    fit(tmp_path / "backup", interrupted_at=9)
    (path,) = backups(tmp_path / "backup")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    np.testing.assert_array_equal(flat(fit(tmp_path / "backup")), expected())
    assert "The backup is damaged" in caplog.text


def test_a_backup_tells_how_often_its_training_was_interrupted(run: Any, tmp_path: Path) -> None:
    run("a")
    start, times, places = time.time(), [], []
    for expected_number in range(2):
        fit(tmp_path / "backup", interrupted_at=5)
        folder = BackupFolder(tmp_path / "backup", num_kept=1)
        folder.find()
        position = json.loads(str(folder.state()["position"]))
        assert position["interruptions"] == expected_number
        times.append(position["began"])
        places.append((position["epoch"], position["step"]))
    assert places == [(0, 4), (1, 2)]
    assert len(set(times)) == 1 and start <= times[0] <= time.time()
    assert not ShorterEpochs._expecting  # an error within one ends what it silences
