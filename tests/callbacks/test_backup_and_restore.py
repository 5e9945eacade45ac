"""An interrupted training that continues from its backup ends like one that was not interrupted."""

import re
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruption import Interruption

import keras_het
from keras_het.callbacks import BackupAndRestore

SAMPLES, BATCH = 64, 8


def linear_model(devices, **options):
    keras.utils.set_random_seed(3)
    strategy = keras_het.HeterogeneousStrategy(list(devices[:2]), share_weights=[3, 1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **options)
    return model


def rows(of_unknown_number=False, batch=BATCH):
    tf.random.set_seed(5)
    numbers = tf.data.Dataset.range(SAMPLES)
    if of_unknown_number:
        numbers = numbers.filter(lambda row: row >= 0)
    samples = numbers.shuffle(SAMPLES, seed=7).map(
        lambda row: (tf.fill([3], tf.cast(row, tf.float32) / SAMPLES), tf.cast(row, tf.float32))
    )
    return samples.batch(batch)


def state(model):
    """All numbers of a training; the optimizer's have the number of steps among them."""
    return [np.array(variable) for variable in (*model.weights, *model.optimizer.variables)]


def trained(devices, data, callbacks, epochs=3, **options):
    model = linear_model(devices, **options.pop("compile", {}))
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return model


def backup(folder, save_freq=3, **options):
    return BackupAndRestore(str(folder / "backup"), save_freq=save_freq, **options)


def interrupted(devices, data, folder, step, save_freq=3, others=(), **options):
    callbacks = [*others, backup(folder, save_freq), Interruption(step)]
    with pytest.raises(InterruptedError):
        trained(devices, data, callbacks, **options)


def assert_same(found, expected):
    assert np.array(found.optimizer.iterations) == np.array(expected.optimizer.iterations)
    for one, other in zip(state(found), state(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def assert_continues(devices, make_data, folder, step, save_freq=3, others=list, **options):
    """Trains to the end, and to the same end with an interruption and what `others` makes."""
    expected = trained(devices, make_data(), [], **options)
    interrupted(devices, make_data(), folder, step, save_freq, others(), **options)
    found = trained(devices, make_data(), [*others(), backup(folder, save_freq)], **options)
    assert_same(found, expected)


@pytest.mark.quick("False-14")
@pytest.mark.parametrize("step", [4, 14, 23])
@pytest.mark.parametrize("of_unknown_number", [False, True])
def test_every_later_epoch_is_whole(logical_devices, tmp_path, of_unknown_number, step):
    assert_continues(logical_devices, lambda: rows(of_unknown_number), tmp_path, step)


OTHERS = {  # how often is saved, and how is trained; `test_every_kill.py` has all epochs and data
    "at the end of a pass": (1, {"steps_per_epoch": 5, "epochs": 3}),
    "as often as pays": ("auto", {}),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("kind", OTHERS)
def test_other_epochs_and_data(logical_devices, tmp_path, kind):
    save_freq, options = OTHERS[kind]
    assert_continues(logical_devices, rows, tmp_path, 8, save_freq, **options)


def damage_the_newest(folder):
    newest = max(folder.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    newest.write_bytes(newest.read_bytes()[:-1])
    return newest


@pytest.mark.full
@pytest.mark.parametrize("is_double", [False, True])
def test_a_damaged_backup_is_an_error_or_the_one_before_is_taken(
    logical_devices, tmp_path, is_double
):
    def both(*more):
        return [backup(tmp_path, double_checkpoint=is_double), *more]

    with pytest.raises(InterruptedError):
        trained(logical_devices, rows(), both(Interruption(14)))
    newest = damage_the_newest(tmp_path / "backup")
    if is_double:
        found = trained(logical_devices, rows(), both())
        assert_same(found, trained(logical_devices, rows(), []))
    else:
        with pytest.raises(OSError, match="damaged") as error:
            trained(logical_devices, rows(), both())
        assert str(newest) in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("all_was_done", [False, True])
def test_the_next_fit_begins_with_the_first_epoch(logical_devices, tmp_path, all_was_done):
    if all_was_done:
        trained(logical_devices, rows(), [backup(tmp_path, delete_checkpoint=False)])
    else:
        interrupted(logical_devices, rows(), tmp_path, 14)
    model = linear_model(logical_devices)
    resumed = model.fit(rows(), epochs=3, verbose=0, callbacks=[backup(tmp_path)])
    assert resumed.epoch == [0, 1, 2]
    assert model.fit(rows(), epochs=3, verbose=0).epoch == [0, 1, 2]


def evaluates_within():
    def evaluate(batch, logs=None):
        if batch == 2:
            made.model.evaluate(rows(), verbose=0)

    made = keras.callbacks.LambdaCallback(on_train_batch_end=evaluate)
    return made


class EvaluatesFirst(keras.callbacks.Callback):
    def __init__(self, is_kept):
        super().__init__()
        self.is_kept, self.kept = is_kept, None

    def on_train_begin(self, logs=None):
        data = rows().take(3)
        if self.is_kept:
            data = self.kept = self.model.distribute_strategy.distribute(data)
        self.model.evaluate(data, verbose=0)


EVALUATES = {
    "within the epoch": lambda: [evaluates_within()],
    "before the first step, kept": lambda: [EvaluatesFirst(True)],
    "before the first step, gone": lambda: [EvaluatesFirst(False)],
}


@pytest.mark.full
@pytest.mark.parametrize("when", EVALUATES)
def test_what_is_evaluated_is_not_what_is_saved(logical_devices, tmp_path, when):
    assert_continues(logical_devices, rows, tmp_path, 12, others=EVALUATES[when])


@pytest.mark.full
def test_a_resumed_fit_that_failed_leaves_nothing_behind(logical_devices, tmp_path):
    options = {"steps_per_epoch": 5, "epochs": 2}
    expected = trained(logical_devices, rows().repeat(), [], **options)
    interrupted(logical_devices, rows().repeat(), tmp_path, 4, **options)
    again, filters = backup(tmp_path), list(warnings.filters)
    with pytest.raises(InterruptedError):
        trained(logical_devices, rows().repeat(), [again, Interruption(1)], **options)
    shutil.rmtree(tmp_path / "backup")
    found = trained(logical_devices, rows().repeat(), [again], **options)
    assert warnings.filters == filters
    assert_same(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("step", [3, 9])
@pytest.mark.parametrize(
    ("seeds", "is_told"),
    [
        pytest.param((7, 7), False, id="equal"),
        pytest.param((7, 8), True, id="other"),
        pytest.param((None, None), True, id="none"),
    ],
)
def test_another_order_is_reported(logical_devices, tmp_path, caplog, seeds, is_told, step):
    def rows_in_order_of(seed):
        tf.random.set_seed(None)
        numbers = tf.data.Dataset.range(SAMPLES).shuffle(SAMPLES, seed=seed)
        return numbers.map(lambda row: (tf.fill([3], tf.cast(row, tf.float32)), row)).batch(BATCH)

    data = [rows_in_order_of(seed) for seed in seeds]
    interrupted(logical_devices, data[0], tmp_path, step, save_freq=1)
    trained(logical_devices, data[1], [backup(tmp_path)])
    # at the end of an epoch nothing is used twice
    assert ("shuffled in another order" in caplog.text) == (is_told and step < 9)


@pytest.mark.full
@pytest.mark.parametrize("seed", [None, 5])
def test_another_order_of_arrays_is_reported(logical_devices, tmp_path, caplog, seed):
    def train(callbacks):
        model = linear_model(logical_devices)
        tf.random.set_seed(seed)
        model.fit(np.ones([64, 3]), np.ones([64]), batch_size=8, verbose=0, callbacks=callbacks)

    with pytest.raises(InterruptedError):
        train([backup(tmp_path), Interruption(4)])
    train([backup(tmp_path)])
    assert ("shuffled in another order" in caplog.text) == (seed is None)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"momentum": 0.9}, None),
        ({"learning_rate": 0.02, "momentum": 0.9}, "SGD with learning rate 0.02; .* SGD and 0.01"),
        ({"beta_1": 0.9}, "continues with Adam and 0.01, after 0 steps of it"),
    ],
    ids=["same", "rate", "class"],
)
@pytest.mark.full
def test_another_optimizer_is_reported(logical_devices, tmp_path, caplog, optimizer, message):
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    interrupted(logical_devices, rows(), tmp_path, 14, others=[slower])
    model = linear_model(logical_devices)
    kind = keras.optimizers.SGD if "momentum" in optimizer else keras.optimizers.Adam
    with model.distribute_strategy.scope():
        model.compile(kind(**{"learning_rate": 0.01, **optimizer}), "mse")
    model.fit(rows(), epochs=3, verbose=0, callbacks=[slower, backup(tmp_path)])
    told = [each.getMessage() for each in caplog.records if "optimizer" in each.getMessage()]
    assert len(told) == (message is not None)
    assert message is None or re.search(message, told[0])


@pytest.mark.full
def test_a_folder_may_be_a_link(logical_devices, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "backup").symlink_to(tmp_path / "real")
    for _ in range(2):  # the folder is gone after the first one
        trained(logical_devices, rows(), [backup(tmp_path)], epochs=1)
        assert not (tmp_path / "real").exists()


@pytest.mark.full
@pytest.mark.parametrize("step", [9, 13])  # after the first epoch's last, and within the second
def test_batches_of_another_size(logical_devices, tmp_path, step):
    interrupted(logical_devices, rows(), tmp_path, step, save_freq=4)
    if step == 13:
        with pytest.raises(ValueError, match="in batches of 16 samples; expected: 8"):
            trained(logical_devices, rows(batch=2 * BATCH), [backup(tmp_path, 4)])
        return
    model = trained(logical_devices, rows(batch=2 * BATCH), [backup(tmp_path, 4)])
    assert np.array(model.optimizer.iterations) == 8 + 4 + 4


def test_outside_of_fit_it_would_save_nothing(logical_devices, tmp_path):
    model = linear_model(logical_devices)
    callbacks = keras.callbacks.CallbackList([backup(tmp_path)], model=model, epochs=1)
    with pytest.raises(RuntimeError, match=r"BackupAndRestore works within fit\. Received"):
        callbacks.on_train_begin()
