import json

import pytest

from keras_het.planning.time_model import LinearTimeModel
from keras_het.strategy.measure.emulated_device import (
    EmulatedDevice,
    read_emulated_devices,
    warn_of_emulated_devices,
)

ONE = {"speed": 4.0, "fixed_seconds": 0.5, "seconds_per_sample": 0.001}


def read(value):
    text = value if isinstance(value, str) else json.dumps(value)
    return read_emulated_devices({"KERAS_HET_EMULATED_DEVICES": text})


def test_unset_means_real_devices(monkeypatch):
    monkeypatch.delenv("KERAS_HET_EMULATED_DEVICES", raising=False)
    assert read_emulated_devices() is None
    assert read(" ") is None


def test_reads_one_device_a_replica(monkeypatch):
    expected = (
        EmulatedDevice(4.0, LinearTimeModel(0.5, 0.001)),
        EmulatedDevice(1.0, LinearTimeModel(0.0, 0.004)),
    )
    devices = [ONE, {"speed": 1, "fixed_seconds": 0, "seconds_per_sample": 0.004}]
    assert read(devices) == expected
    monkeypatch.setenv("KERAS_HET_EMULATED_DEVICES", json.dumps(devices))
    assert read_emulated_devices() == expected


def test_each_part_of_a_share_has_the_fixed_time():
    (device,) = read([ONE]) or ()
    times = device.in_parts(10).time_model
    assert [times.seconds(10), times.seconds(25)] == pytest.approx([0.51, 1.525])


def test_description_says_emulated(caplog):
    warn_of_emulated_devices(read([ONE, {**ONE, "fixed_seconds": 0.0}]), 2)
    assert caplog.messages[0].splitlines() == [
        "local replica 0: EMULATED device of speed 4: a step takes at least "
        "500 ms + 1 ms per sample",
        "local replica 1: EMULATED device of speed 4: a step takes at least 1 ms per sample",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{]", "line 1 column 3"),
        (ONE, "must be a mapping"),
        ([4.0], "must be a mapping"),
        ([ONE, {"speed": 1.0}], "missing .* 'fixed_seconds' and 'seconds_per_sample'"),
        ([{**ONE, "extra": 1}], "unexpected keyword argument 'extra'"),
        ([{**ONE, "speed": "4"}], "not supported between instances of 'int' and 'str'"),
        ([{**ONE, "speed": 0}], "positive finite speed"),
        ([ONE, {**ONE, "fixed_seconds": -1}], "`fixed_seconds` must be finite"),
        ([{**ONE, "seconds_per_sample": float("nan")}], "`seconds_per_sample` must be finite"),
    ],
)
def test_malformed(value, message):
    with pytest.raises(ValueError, match=f"KERAS_HET_EMULATED_DEVICES .*{message}.*Received"):
        read(value)
