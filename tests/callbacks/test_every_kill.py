"""Wherever a training is killed, each sample is used by the steps that use it without a kill.

The loss is linear in the weights and the rate of step t is 2**t, so bit t of a sample's weight says
whether step t used it. One training writes backups at every frequency. The one that is there at a
moment is what a kill at that moment leaves: a new training, with a new strategy, continues from it.
"""

import io
import itertools
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from interruption import OfThisProcess

import keras_het
from keras_het.callbacks import BackupAndRestore

SAMPLES, BATCH, STEPS, EPOCHS = 14, 4, 4, 3  # the last batch of a pass has 2 samples
X = np.eye(SAMPLES, dtype="float32")
Y = np.arange(SAMPLES, dtype="float32") % 2
SAVE_FREQUENCIES = ("epoch", *range(1, 2 * STEPS + 1))
Arguments = dict[str, Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ran out of data"),
    pytest.mark.filterwarnings("ignore:.*shuffle=True. was passed"),
]


class PowerOfTwo(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 2.0 ** keras.ops.cast(step, "float32")


class Output(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -y_pred[:, 0]


def rows_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rows = slice(batch * BATCH, (batch + 1) * BATCH)
    return X[rows], Y[rows]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return rows_of(index)


class EndlessBatches(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return rows_of(index % STEPS)


def generator(number: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return (rows_of(batch % STEPS) for batch in itertools.islice(itertools.count(), number))


def data_set(is_shuffled: bool = True, of_unknown_size: bool = False) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(SAMPLES)
    if of_unknown_size:
        numbers = numbers.filter(lambda row: row >= 0)
    if is_shuffled:
        numbers = numbers.shuffle(SAMPLES, seed=7)
    return numbers.map(lambda row: (tf.gather(X, row), tf.gather(Y, row))).batch(BATCH)


def arrays(**more: Any) -> Arguments:
    return {"x": X, "y": Y, "batch_size": BATCH, **more}


def data_frames() -> Arguments:
    pandas = pytest.importorskip("pandas")
    return arrays(x=pandas.DataFrame(X), y=pandas.Series(Y))


KINDS: dict[str, Callable[[], Arguments]] = {
    "arrays": arrays,
    "arrays in order": lambda: arrays(shuffle=False),
    "arrays, batches shuffled": lambda: arrays(shuffle="batch"),
    "tensors": lambda: arrays(x=tf.constant(X), y=tf.constant(Y)),
    "pandas": data_frames,
    "arrays, sample_weight": lambda: arrays(sample_weight=np.full(SAMPLES, 2.0)),
    "arrays, class_weight": lambda: arrays(class_weight={0: 1.0, 1: 2.0}),
    "arrays, validation_freq": lambda: arrays(validation_data=(X, Y), validation_freq=2),
    "arrays, validation_split": lambda: arrays(validation_split=0.3),
    "arrays, a share of 0": lambda: arrays(shares=[1, 0]),
    "arrays, one step": lambda: arrays(batch_size=SAMPLES),
    "arrays, initial_epoch": lambda: arrays(initial_epoch=1),
    "arrays, a pass an epoch": lambda: arrays(steps_per_epoch=4),
    "arrays, half a pass an epoch": lambda: arrays(steps_per_epoch=2),
    "arrays, epochs of 3": lambda: arrays(steps_per_epoch=3),
    "arrays, epochs of 5": lambda: arrays(steps_per_epoch=5),
    "arrays, executions of 3": lambda: arrays(compile={"steps_per_execution": 3}),
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset in order": lambda: {"x": Batches(), "shuffle": False},
    "PyDataset, workers=2": lambda: {"x": Batches(workers=2)},
    "PyDataset, workers=2, in order": lambda: {"x": Batches(workers=2), "shuffle": False},
    "PyDataset, class_weight": lambda: {"x": Batches(), "class_weight": {0: 1.0, 1: 2.0}},
    "PyDataset, validation": lambda: {"x": Batches(), "validation_data": Batches()},
    "PyDataset, a pass an epoch": lambda: {"x": Batches(workers=2), "steps_per_epoch": 4},
    "PyDataset, half a pass": lambda: {"x": Batches(), "steps_per_epoch": 2},
    "endless PyDataset": lambda: {"x": EndlessBatches(), "steps_per_epoch": 3},
    "endless PyDataset, workers=2": lambda: {"x": EndlessBatches(workers=2), "steps_per_epoch": 4},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3},
    "generator that ends": lambda: {"x": generator(12), "steps_per_epoch": 4},
    "dataset": lambda: {"x": data_set()},
    "dataset in order": lambda: {"x": data_set(is_shuffled=False)},
    "dataset, validation": lambda: {"x": data_set(), "validation_data": data_set()},
    "dataset, class_weight": lambda: {"x": data_set(), "class_weight": {0: 1.0, 1: 2.0}},
    "dataset, a share of 0": lambda: {"x": data_set(), "shares": [0, 1]},
    "dataset, epochs of 3": lambda: {"x": data_set(), "steps_per_epoch": 3},
    "dataset of unknown size": lambda: {"x": data_set(of_unknown_size=True)},
    "dataset filtered after its shuffle": lambda: {
        "x": data_set().unbatch().filter(lambda *_: True).batch(BATCH)
    },
    "dataset of unknown size, validation": lambda: {
        "x": data_set(of_unknown_size=True),
        "validation_data": data_set(of_unknown_size=True),
    },
    "endless dataset": lambda: {"x": data_set().repeat(), "steps_per_epoch": 4},
    "endless dataset, epochs of 5": lambda: {"x": data_set().repeat(), "steps_per_epoch": 5},
    "endless, of unknown size": lambda: {
        "x": data_set(of_unknown_size=True).repeat(),
        "steps_per_epoch": 3,
    },
}


class StepsOfEpochs(OfThisProcess):
    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, int] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.steps[epoch] = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps[self.epoch] += 1


def trained(
    devices: Any, arguments: Arguments, callbacks: Any = (), epochs: int = EPOCHS
) -> tuple[list[int], list[int]]:
    """For each sample the steps that used it, as bits; and the number of steps of each epoch."""
    keras.utils.set_random_seed(3)
    strategy = keras_het.HeterogeneousStrategy(
        list(devices[:2]), share_weights=arguments.pop("shares", None)
    )
    with strategy.scope():
        output = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((SAMPLES,)), output])
        optimizer = keras.optimizers.SGD(PowerOfTwo())
        model.compile(optimizer, Output(reduction="sum"), **arguments.pop("compile", {}))
    counts = StepsOfEpochs()
    model.fit(**arguments, epochs=epochs, verbose=0, callbacks=[*callbacks, counts])
    return np.array(output.kernel)[:, 0].astype(int).tolist(), list(counts.steps.values())


class Kills(OfThisProcess):
    """Keeps the backup that a kill would leave, at every moment at which one may come.

    Args:
        folder: the folder of the backup.
        kept: where they are kept, each once.
    """

    def __init__(self, folder: Path, kept: dict[str, Path]) -> None:
        super().__init__()
        self.folder, self.kept = folder, kept
        self.left: dict[tuple[str, int], str | None] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("step", int(self.model.optimizer.iterations.numpy()))

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("validation after step", int(self.model.optimizer.iterations.numpy()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("end of epoch", epoch)

    def note(self, moment: str, number: int) -> None:
        newest = max(
            self.folder.glob("backup-*"), key=lambda path: path.stat().st_mtime_ns, default=None
        )
        content = None
        if newest is not None and (content := content_of(newest)) not in self.kept:
            # A file written by another callback of the same content has another hash in its name.
            self.kept[content] = Path(shutil.copy(newest, self.folder.parent / "kept"))
        self.left[moment, number] = content


def content_of(backup: Path) -> str:
    """Position and weights in a backup, without times of day and the number of interruptions."""
    with h5py.File(backup) as file:
        kernel = next(iter(file["layers/dense/vars"].values()))[()].tolist()
        with np.load(io.BytesIO(file["keras_het"][()].tobytes())) as state:
            position = json.loads(str(state["position"]))
            own = {key: position[key] for key in position.keys() - {"began", "interruptions"}}
            return json.dumps([own, kernel], sort_keys=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(logging.getLogger("tensorflow"), "level", logging.ERROR)
    keras.utils.set_random_seed(3)  # inputs are made before a training sets it
    (tmp_path / "kept").mkdir()
    return tmp_path


def start_from(backup: Path, folder: Path) -> None:
    """Put a backup where a new training finds it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(backup, folder)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_used_as_without_a_kill(
    logical_devices: Any, folder: Path, kind: str
) -> None:
    arguments, kept = KINDS[kind], {}
    expected = trained(logical_devices, arguments())
    by_frequency = {freq: Kills(folder / str(freq), kept) for freq in SAVE_FREQUENCIES}
    pairs = [(BackupAndRestore(str(k.folder), freq), k) for freq, k in by_frequency.items()]
    assert trained(logical_devices, arguments(), itertools.chain(*pairs)) == expected
    for content, backup in list(kept.items()):
        again = Kills(folder / "again", {})
        start_from(backup, again.folder)
        restore = BackupAndRestore(str(again.folder), 1)
        used, steps = trained(logical_devices, arguments(), [restore, again])
        assert used == expected[0], content
        assert all(steps[1:]), content
        # A second kill leaves what the first would have left then.
        for moment, then in again.left.items():
            expected_then = (content, by_frequency[1].left[moment])  # or the one it began with
            assert moment[0] == "end of epoch" or then in expected_then, content


@pytest.mark.quick("arrays-4")
@pytest.mark.parametrize("save_freq", ["epoch", STEPS])
@pytest.mark.parametrize("kind", ["arrays", "PyDataset", "PyDataset, workers=2"])
def test_a_kill_at_the_end_of_an_epoch_skips_none(
    logical_devices: Any, folder: Path, kind: str, save_freq: str | int
) -> None:
    kills = Kills(folder / "backup", {})
    restore = BackupAndRestore(str(kills.folder), save_freq)
    expected, _ = trained(logical_devices, KINDS[kind](), [restore, kills])
    start_from(kills.kept[kills.left["step", STEPS + 1]], kills.folder)
    random.seed(4)
    found = trained(logical_devices, KINDS[kind](), [BackupAndRestore(str(kills.folder))])
    steps = [each for each in found[1] if each]  # what is left of the first epoch may be its end
    assert (found[0], steps) == (expected, [STEPS, STEPS])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_training_that_had_ended_continues_with_more_epochs(
    logical_devices: Any, folder: Path, kind: str
) -> None:
    for epochs, steps in ((1, [STEPS]), (1, []), (3, [STEPS, STEPS])):
        backup = BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)
        used, found = trained(logical_devices, KINDS[kind](), [backup], epochs)
        assert found == steps
    assert (used, [STEPS] * EPOCHS) == trained(logical_devices, KINDS[kind]())


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        pytest.param(8, True, id="none left"),
        pytest.param(5, True, id="fewer"),
        pytest.param(9, False, id="one left"),
    ],
)
def test_an_epoch_without_a_step_after_a_resume_is_an_error(
    logical_devices: Any, folder: Path, given: int, is_told: bool
) -> None:
    kills = Kills(folder / "backup", {})
    steps = {"steps_per_epoch": 4}
    restore = BackupAndRestore(str(kills.folder))
    trained(logical_devices, {"x": generator(12), **steps}, [restore, kills])
    start_from(kills.kept[kills.left["step", 9]], kills.folder)

    def go_on() -> tuple[list[int], list[int]]:
        again = BackupAndRestore(str(kills.folder), delete_checkpoint=False)
        return trained(logical_devices, {"x": generator(given), **steps}, [again])

    if is_told:
        with pytest.raises(ValueError, match="trained no step") as error:
            go_on()
        assert "epoch 3, step 1; expected: 4 steps" in str(error.value)
        assert list(kills.folder.glob("backup-*"))
    else:
        assert go_on()[1] == [1]


class KillAt(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == self.step:
            raise KeyboardInterrupt


@pytest.mark.quick("6")
@pytest.mark.parametrize("step", range(1, 2 * STEPS))
def test_random_layers_continue_with_their_numbers(
    logical_devices: Any, folder: Path, step: int
) -> None:
    def train(*callbacks: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with keras_het.HeterogeneousStrategy(
            list(logical_devices[:2]), share_weights=[2, 1]
        ).scope():
            noise = keras.Sequential([keras.layers.GaussianNoise(0.1)])
            layers = keras.layers.Dropout(0.3), noise, keras.layers.Dense(1)
            model = keras.Sequential([keras.Input((SAMPLES,)), *layers])
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        return model.get_weights()

    expected = train()
    with pytest.raises(KeyboardInterrupt):
        train(BackupAndRestore(str(folder / "backup"), save_freq=1), KillAt(step))
    found = train(BackupAndRestore(str(folder / "backup")))
    np.testing.assert_equal(found, expected)
