"""Which devices a strategy counts."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

import keras_het
from keras_het.strategy.membership import physical_devices


@pytest.fixture
def two_gpus_of_four(monkeypatch):
    """The script hides the two in the middle, and has cut the first one into two parts."""
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in range(4)]
    parts = {gpus[0].name: ["a", "b"]}
    visible = {"GPU": [gpus[0], gpus[3]], "CPU": tf.config.get_visible_devices("CPU")}
    monkeypatch.setattr(tf.config, "get_visible_devices", visible.get)
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda device: parts.get(device.name)
    )
    return gpus


def test_hidden_devices_do_not_count(two_gpus_of_four):
    assert physical_devices("GPU") == [two_gpus_of_four[index] for index in (0, 0, 3)]
    with pytest.raises(ValueError, match=r"Received: \['GPU:3'\]; available: .*'GPU:2'\]"):
        keras_het.HeterogeneousStrategy(devices=["GPU:0", "GPU:3"])


def test_a_script_that_hides_its_gpus_trains_on_its_cpu(two_gpus_of_four, monkeypatch):
    visible = {"GPU": [], "CPU": tf.config.get_visible_devices("CPU")}
    monkeypatch.setattr(tf.config, "get_visible_devices", visible.get)
    strategy = keras_het.HeterogeneousStrategy()
    assert all("CPU" in device for device in strategy.extended.worker_devices)
