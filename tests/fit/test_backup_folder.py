"""A backup is there as a whole, or is an error that names the file, wherever a save ends."""

import errno
import fcntl
import hashlib
import io
import logging
import os
import resource
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from file_operations import Watch

from keras_het.callbacks import BackupAndRestore
from keras_het.fit.backup_folder import BackupFolder


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def set_all(model, value):
    for variable in (*model.weights, *model.optimizer.variables):
        variable.assign(np.full(variable.shape, value))


def add(folder, model, value):
    set_all(model, value)
    folder.add(model, {"number": np.array(value), "service/a/b": np.full(3, value)})


def assert_whole(path, model, values):
    """Weights, optimizer and the rest are of the same save, one of `values`; returns which."""
    folder = BackupFolder(path, 1)
    assert folder.find()
    set_all(model, 99)
    state = folder.restore(model)
    assert set(state) == {"number", "service/a/b"}
    value = int(state["number"])
    assert value in values
    np.testing.assert_array_equal(state["service/a/b"], value)
    for variable in (*model.weights, *model.optimizer.variables):
        np.testing.assert_array_equal(np.array(variable), value)
    return value


def backups(path):
    return sorted(path.glob("backup-*"), key=lambda file: int(file.name.split("-")[1]))


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_kept", [1, 2])
def test_what_a_kill_leaves_behind_at_every_file_operation(model, tmp_path, num_kept):
    path = tmp_path / "backup"
    folder = BackupFolder(path, num_kept)
    for value in range(3):
        add(folder, model, value)
    with Watch(path, lambda number: shutil.copytree(path, tmp_path / str(number))) as watch:
        add(folder, model, 3)
    # It is on the disk before it has its name, and the name is before the one before is removed.
    order = [name for name in watch.seen if name in ("fsync", "os.rename", "os.remove")]
    assert order == ["fsync", "os.rename", "fsync", "os.remove"]
    assert {"open", "posix_fallocate", "after save_weights", "after close"} <= set(watch.seen)
    found = [assert_whole(tmp_path / str(n), model, {2, 3}) for n in range(1, len(watch.seen))]
    assert found == sorted(found) and set(found) == {2, 3}
    assert assert_whole(path, model, {3}) == 3
    assert len(list(path.iterdir())) == num_kept


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_kept", [1, 2])
def test_an_error_at_every_file_operation(model, tmp_path, num_kept):
    path = tmp_path / "backup"
    folder = BackupFolder(path, num_kept)
    add(folder, model, 1)
    count = 0

    def fail(number):
        if number == count:
            raise OSError(errno.ENOSPC, "No space left on device")

    watch = Watch(path, fail)
    whole, refused = 1, 0
    while len(watch.seen) >= count:
        count += 1
        try:
            with watch:
                add(folder, model, count + 1)
        except OSError as error:
            assert "No space left on device" in str(error)
            refused += 1
        whole = assert_whole(path, model, {whole, count + 1})
    assert refused > 10
    assert whole == count + 1
    assert len(list(path.iterdir())) == num_kept


def test_a_full_disk_is_an_error_that_names_the_file(model, tmp_path):
    path = tmp_path / "backup"
    folder = BackupFolder(path, 1)
    add(folder, model, 1)
    (whole,) = path.iterdir()
    size, (_, hard) = whole.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, size // 2, size - 1, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="could not be written") as error:
                add(folder, model, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert str(path / "incomplete.weights.h5") in str(error.value)
        assert str(whole) in str(error.value)
        assert list(path.iterdir()) == [whole]
    assert_whole(path, model, {1})
    add(folder, model, 3)
    assert_whole(path, model, {3})


def damages(size, num_places):
    """Changes of a file of so many bytes."""
    places = sorted({*range(0, size, size // num_places), size - 1})
    for place in places:
        yield lambda content, end=place: content[:end]
        yield (
            lambda content, at=place: content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        )
    yield lambda content: content + b"\0"


def test_a_damaged_backup_is_refused_by_its_name(model, tmp_path):
    add(BackupFolder(tmp_path, 1), model, 1)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damage in damages(len(content), 100):
        path.write_bytes(damage(content))
        folder = BackupFolder(tmp_path, 1)
        with pytest.raises(OSError, match="damaged") as error:
            folder.find()
        assert str(path) in str(error.value)
        assert folder.newest is None


def test_the_one_before_a_damaged_backup(model, tmp_path, caplog):
    folder = BackupFolder(tmp_path, 2)
    for value in (1, 2):
        add(folder, model, value)
    first, second = backups(tmp_path)
    content = second.read_bytes()
    for damage in damages(len(content), 5):
        second.write_bytes(damage(content))
        with caplog.at_level(logging.WARNING, logger="keras_het"):
            assert_whole(tmp_path, model, {1})
        assert str(first) in caplog.text and str(second) in caplog.text
        caplog.clear()
    # nobody has changed anything: of several workers each one reads, and only the chief writes
    assert backups(tmp_path) == [first, second]
    folder = BackupFolder(tmp_path, 2)
    folder.find()
    add(folder, model, 3)
    assert [file.name.split("-")[1] for file in backups(tmp_path)] == ["1", "3"]
    assert_whole(tmp_path, model, {3})


def test_what_else_lies_in_the_folder_is_left_alone(model, tmp_path):
    others = [tmp_path / name for name in ("backup-notes.txt", "backup-7-.weights.h5", "x.h5")]
    for other in others:
        other.write_text("mine")
    folder = BackupFolder(tmp_path, 1)
    assert folder.find() == "" and folder.newest is None and folder.state() == {}
    for value in (1, 2):
        add(folder, model, value)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(other.name for other in others), folder.newest.name
    }  # fmt: skip


def test_what_is_no_file_beside_a_backup(model, tmp_path):
    folder = BackupFolder(tmp_path, 1)
    add(folder, model, 1)
    name = f"{'0' * 64}.weights.h5"
    (tmp_path / f"backup-7-{name}").mkdir()
    (tmp_path / f"backup-8-{name}").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / f"backup-9-{name}")
    (tmp_path / f"backup-{'9' * 30}-{name}").write_text("a number that no array of integers holds")
    assert_whole(tmp_path, model, {1})
    add(folder, model, 2)
    assert_whole(tmp_path, model, {2})
    shutil.copy(folder.newest, tmp_path / "copy")
    folder.newest.unlink()
    with pytest.raises(OSError, match="damaged, and there is no other"):
        BackupFolder(tmp_path, 1).find()


def test_no_link_leads_to_another_file(model, tmp_path):
    (path := tmp_path / "backup").mkdir()
    (mine := tmp_path / "mine.h5").write_text("mine")
    names = ("incomplete.weights.h5", "keras_het.lock")
    for link in (os.symlink, os.link):
        for name in names:
            link(mine, path / name)
        folder = BackupFolder(path, 1)
        if link is os.symlink:
            folder.lock()
        add(folder, model, 1)
        folder.unlock()
        if link is os.link:
            (path / names[1]).unlink()
            os.link(mine, path / names[0])
            with folder.newest.open("rb") as content:
                BackupFolder(path, 1).adopt(folder.newest.name, content)
        assert mine.read_text() == "mine"
    assert_whole(path, model, {1})


def test_a_private_folder_is_nobody_elses(model, tmp_path):
    add(BackupFolder(tmp_path / "own", 1, is_private=True), model, 1)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "own").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("own", "link"):
        folder = BackupFolder(tmp_path / name, 1, is_private=True)
        assert folder.find() == ""
        with pytest.raises(OSError, match="Others may read or write there"):
            add(folder, model, 2)


def test_a_whole_file_without_state_is_refused_by_its_name(model, tmp_path):
    folder = BackupFolder(tmp_path, 1)
    for content in (b"no weights", None):
        path = tmp_path / "x.weights.h5"
        model.save_weights(path)
        content = content or path.read_bytes()
        name = f"backup-1-{hashlib.sha256(content).hexdigest()}.weights.h5"
        folder.adopt(name, io.BytesIO(content))
        with pytest.raises(OSError, match=f"no state of a training. Received: {tmp_path / name}"):
            folder.restore(model)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [((5, 1), "object <Dense name=dense"), ((4,), "Received: 2 weights; expected: 4")],
)
def test_another_model_is_refused(tmp_path, sizes, problem):
    models = [
        keras.Sequential([keras.Input((3,)), *map(keras.layers.Dense, each)])
        for each in ((4, 1), sizes)
    ]
    for each in models:
        each.compile("sgd", "mse")
    folder = BackupFolder(tmp_path, 1)
    folder.add(models[0], {})
    with pytest.raises(ValueError, match=f"is that of another model.*{problem}"):
        folder.restore(models[1])


@pytest.mark.parametrize(
    "name", ["latest.weights.h5", "training_metadata.json", "data_position.json"]
)
def test_another_format_is_refused(model, tmp_path, name):
    add(BackupFolder(tmp_path, 1), model, 1)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="another backup_dir") as error:
        BackupFolder(tmp_path, 1).find()
    assert str(tmp_path / name) in str(error.value)


def test_a_url_is_refused():
    with pytest.raises(ValueError, match="gs://bucket/backup"):
        BackupAndRestore("gs://bucket/backup")


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 7 on host-a since then", file=file, end="", flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_belongs_to_the_process_that_locked_it_for_as_long_as_that_lives(tmp_path):
    folder = BackupFolder(tmp_path, 1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "keras_het.lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="locked by process 7 on host-a since then") as caught:
            folder.lock()
        assert str(tmp_path) in str(caught.value)
        holder.kill()
        holder.wait(20)
    folder.lock()
    assert f"process {os.getpid()} on " in (tmp_path / "keras_het.lock").read_text()
    folder.unlock()
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    def lockf(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with caplog.at_level(logging.WARNING):
        BackupFolder(tmp_path, 1).lock()
    assert "cannot be locked: [Errno 37] No locks available" in caplog.text


def test_a_lock_that_its_last_owner_removes_meanwhile_is_none(tmp_path, monkeypatch):
    lockf, path = fcntl.lockf, tmp_path / "keras_het.lock"
    calls = []

    def lock_late(*args):
        if not calls:
            path.unlink()
        calls.append(args)
        lockf(*args)

    monkeypatch.setattr(fcntl, "lockf", lock_late)
    folder = BackupFolder(tmp_path, 1)
    folder.lock()
    assert len(calls) == 2 and path.exists()
    folder.unlock()
