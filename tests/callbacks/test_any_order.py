"""All callbacks of keras_het in one `fit`, in every order of their list."""

import functools
import itertools
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from small_training import BATCH, NUM_BATCHES, data, flat, make_model

from keras_het.callbacks import (
    AsyncWorkers,
    BackupAndRestore,
    BatchBalancer,
    DataValidation,
    LoaderTuner,
)
from keras_het.fit.backup_folder import BackupFolder

EPOCHS = 2
STEPS = EPOCHS * NUM_BATCHES
NAMES = ("backup", "balancer", "hybrid", "tuner", "validation")
ORDERS = list(itertools.permutations(NAMES))


class Shards:
    """Counts rows as TensorFlow Data Validation would."""

    rows = 0

    def __init__(self, *args, **options):
        self.own = 0

    def observe(self, batch):
        self.own += sum(len(part) for part in batch[0].values)

    def finish(self):
        Shards.rows += self.own
        return {}


@pytest.fixture
def tools(monkeypatch):
    """Stands in for data validation, which needs an environment of its own."""
    module = SimpleNamespace(ShardStatistics=Shards, DataAnomalyError=ValueError)
    monkeypatch.setitem(sys.modules, "keras_het.loader.validation", module)
    monkeypatch.setattr(Shards, "rows", 0)


class Looks(keras.callbacks.Callback):
    """Notes the weights and logs at the end of each epoch, as a checkpoint does."""

    def __init__(self):
        super().__init__()
        self.weights, self.logs = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(flat(self.model))
        self.logs.append(set(logs))


@functools.cache
def on_one_device():
    looks = Looks()
    model = make_model(tf.distribute.OneDeviceStrategy(DEVICES[0]))
    model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=[looks])
    return looks.weights


def train(strategy, folder, order):
    model = make_model(strategy)
    callbacks = {
        "backup": BackupAndRestore(folder, save_freq="epoch", delete_checkpoint=False),
        "balancer": BatchBalancer("even"),
        "hybrid": AsyncWorkers("delta", period=2),
        "tuner": LoaderTuner("fixed", cooperate_with_other_jobs=False),
        "validation": DataValidation(SimpleNamespace(feature=[]), num_batches_to_check=3),
    }
    first, last = Looks(), Looks()
    listed = [first, *(callbacks[name] for name in order), last]
    model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=listed)
    return model, callbacks, (first, last)


@pytest.mark.quick("119")
@pytest.mark.parametrize("number", range(len(ORDERS)), ids=str)
def test_any_order_gives_the_same(strategy, tools, tmp_path, number):
    del tools
    model, callbacks, both = train(strategy, tmp_path / "backup", ORDERS[number])
    for looks in both:
        np.testing.assert_allclose(looks.weights, on_one_device(), rtol=1e-5)
        assert all("input_wait_fraction" in logs for logs in looks.logs)
    final = flat(model)
    np.testing.assert_array_equal(final, both[0].weights[-1])
    assert Shards.rows == 3 * BATCH
    assert (
        callbacks["tuner"].train_input_wait.steps == STEPS - 3
    )  # it did not read the first batches
    assert callbacks["balancer"].measurements
    folder = BackupFolder(tmp_path / "backup", 1)
    folder.find()
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    folder.restore(model)
    np.testing.assert_array_equal(flat(model), final)
