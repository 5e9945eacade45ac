"""What routes answer about trainings, and series cut into columns."""

from __future__ import annotations

import base64

import made_training
import numpy as np
import pytest

from keras_het.planning.diagnosis.recording import PHASES, Device
from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.log_content import Value, log_content, windows
from keras_het.tensorboard.views import columns, edges_between


@pytest.fixture(scope="module")
def training():
    return log_content(made_training.values(6, 1000))


def unpacked(answer, name, rows):
    return np.frombuffer(base64.b64decode(answer[name]), "<f4").reshape(rows, -1)


def test_overview(training):
    answer = views.overview(training, training)
    assert (answer["first"], answer["last"], answer["thinned"]) == (0, 1000, False)
    assert answer["measured"] is None
    assert answer["devices"][2]["model"] == "NVIDIA GeForce RTX 2080 Ti"
    assert [each["step"] for each in answer["changes"]] == [200, 500, 800]
    names = [each["name"] for each in answer["quantities"]]
    assert {"compute", "share", "hw.temperature"} <= set(names)
    assert "process.cpu.usage" not in names  # never known
    assert answer["samples_per_second"] > 0


def test_heat_map_has_the_values_of_the_steps(training):
    answer = views.heat_map(views.between(training, 100, 150), "compute", "median")
    assert answer is not None
    assert answer["edges"] == list(range(100, 151))
    values = unpacked(answer, "values", answer["rows"])
    np.testing.assert_allclose(values.T, training.recording.compute[100:150], rtol=1e-6)
    assert views.heat_map(training, "no such", "median") is None


def test_heat_map_of_hardware_holds_each_sample(training):
    answer = views.heat_map(training, "hw.gpu.utilization", "median")
    assert answer is not None
    values = unpacked(answer, "values", 6)
    np.testing.assert_allclose(values[0], 0.9)


def test_many_replicas_and_steps_become_few_rows_and_columns():
    replicas, steps = 450, 900
    block = np.zeros((steps, 5, replicas), np.float32)
    block[:, 0] = np.arange(replicas)
    devices = tuple(Device(f"worker {n}", n) for n in range(replicas))
    content = log_content(
        [
            Value(log_format.SETUP, 0, 1.0, log_format.setup_text(devices, ()).encode()),
            Value(log_format.STEPS, 0, 2.0, block),
        ]
    )
    answer = views.heat_map(content, "compute", "highest", most_columns=10**9)
    assert answer is not None
    assert (answer["group"], answer["rows"], len(answer["edges"])) == (3, 150, 601)
    values = unpacked(answer, "values", 150)
    np.testing.assert_array_equal(values[:3, 0], [2, 5, 8])


def test_lanes_of_chosen_devices(training):
    answer = views.lanes(training, [4, 1, 99, -1])
    assert answer["devices"] == [4, 1]
    assert len(answer["edges"]) == 301
    shares = unpacked(answer, "share", 2)
    assert shares[0, 0] == shares[1, 0] == 64
    assert shares[0, -1] < 64 < shares[1, -1]


def test_steps_that_were_not_measured_are_distinguished_from_measured_ones():
    values = list(made_training.values(2, 60))
    marks = {0: [0, 0, 0, 1] * 5, 20: [0, 0, 1] + [1] * 17}  # and an older log has none
    values += [
        Value(log_format.MEASURED, step, 2.0 + step, np.array(mark, np.float32))
        for step, mark in marks.items()
    ]
    content = log_content(values)
    whole = views.overview(content, content)
    assert whole["measured"] == 5 + 18 + 20
    told = views.lanes(views.between(content, 5, 25), [0])["sampled"]
    assert told[:4] == [
        *[(1, "measured step 7; stands for steps 4 to 7")] * 2,
        (0, "measured step 7; stands for steps 4 to 7"),
        (1, "measured step 11; stands for steps 8 to 11"),
    ]
    assert told[-3:] == [(0, "measured step 22; stands for steps 20 to 22"), (0, ""), (0, "")]
    heat_map = views.heat_map(content, "compute", "median", most_columns=10)
    assert heat_map is not None
    assert heat_map["sampled"][:2] == [(5, "1 of 6 steps measured"), (4, "2 of 6 steps measured")]
    assert heat_map["sampled"][-1] == (0, "")
    assert views.lanes(views.between(content, 23, 60), [0])["sampled"] is None


def test_a_zoom_into_one_row_of_old_steps_shows_it():
    values = list(made_training.values(2, 0))
    values.append(Value(log_format.thinned_tag(32), 0, 2.0, np.ones((4, 3, 5, 2), np.float32)))
    content = log_content(values)
    assert views.span(content) == (0, 128)
    part = views.between(content, 40, 45)
    assert part.recording.steps.tolist() == [32]
    assert views.between(content, 0, 64).every.tolist() == [32, 32]


def test_a_training_without_steps_says_so():
    content = log_content(made_training.values(2, 0))
    answer = views.overview(content, content)
    assert (answer["first"], answer["last"], answer["step_seconds"]) == (0, 0, None)
    assert views.diagnosis(content)["verdict"] == []
    for name in ("compute", "wall"):
        answer_of_map = views.heat_map(content, name, "median")
        assert answer_of_map is not None
        assert answer_of_map["low"] is None
    assert views.lanes(content, [0])["edges"] == [0, 1]


def test_diagnosis_names_a_device_and_what_it_costs(training):
    answer = views.diagnosis(views.between(training, 700, 799))
    assert answer["verdict"]
    costs = answer["what_if"]
    assert costs["by_device"][1] == min(costs["by_device"])
    assert costs["by_device"][1] < costs["step_seconds"]
    assert set(costs["by_worker"]) == {"0", "1", "2"}
    assert answer["gain"] > 1


def test_a_diagnosis_without_lines_says_what_is_missing(training):
    answer = views.diagnosis(views.between(training, 700, 709))
    assert answer["verdict"] == []
    (reason,) = answer["missing"]
    assert reason.startswith("not enough steps yet")


def test_a_device_whose_speed_changes_stands_out(training):
    devices = views.overview(training, training)["devices"]
    spreads = [device["spread"] for device in devices]
    assert np.argmax(spreads) == 1
    assert spreads[1] > 1.5 > max(spreads[0], *spreads[2:])


def test_the_times_of_devices_are_means_as_the_step_time_is(training):
    """The report has means, too: one name, one kind of average."""
    answer = views.overview(training, training)
    sums = [sum(device[name] for name in PHASES) for device in answer["devices"]]
    assert np.mean(sums) == pytest.approx(answer["step_seconds"], rel=1e-3)


def test_windows_ignore_what_is_unknown():
    rows = np.array([3.0, np.nan, 1.0, np.nan, np.nan, np.nan, 5.0])
    low, middle, high = windows(rows, 3).T
    np.testing.assert_array_equal(low, [1, np.nan, 5])
    np.testing.assert_array_equal(middle, [2, np.nan, 5])
    np.testing.assert_array_equal(high, [3, np.nan, 5])


def test_windows_agree_with_numpy():
    rows = np.random.default_rng(0).random((24, 3, 2))
    rows[rows < 0.2] = np.nan
    low, middle, high = np.moveaxis(windows(rows, 8), 1, 0)
    parts = rows.reshape(3, 8, 3, 2)
    np.testing.assert_array_equal(low, np.nanmin(parts, axis=1))
    np.testing.assert_allclose(middle, np.nanmedian(parts, axis=1))
    np.testing.assert_array_equal(high, np.nanmax(parts, axis=1))


@pytest.mark.parametrize(
    ("first", "last", "most", "edges"),
    [
        (0, 3, 600, [0, 1, 2, 3]),
        (5, 6, 600, [5, 6]),
        (0, 0, 600, [0, 1]),
        (10, 20, 4, [10, 12, 15, 18, 20]),
    ],
)
def test_edges_are_whole_steps(first, last, most, edges):
    assert edges_between(first, last, most).tolist() == edges


def cut(steps, every, values, edges, how="median"):
    arrays = (np.array(steps), np.array(every), np.array(values, float)[:, None], np.array(edges))
    return columns(*arrays, how)[:, 0].tolist()


def test_columns_have_the_value_of_their_steps():
    assert cut(range(6), [1] * 6, [1, 2, 9, 4, 5, 6], [0, 3, 6]) == [2, 5]
    assert cut(range(6), [1] * 6, [1, 2, 9, 4, 5, 6], [0, 3, 6], "highest") == [9, 6]
    assert cut(range(5), [1] * 5, [1, 2, 9, 4, 6], [0, 3, 5]) == [2, 5]


def test_a_row_of_old_steps_continues_in_the_columns_that_it_covers():
    assert cut([0, 8, 16, 17], [8, 8, 1, 1], [1, 2, 3, 4], [0, 4, 8, 12, 16, 17, 18]) == [
        *(1, 1, 2, 2, 3, 4)
    ]


def test_a_gap_stays_unknown():
    values = cut([0, 1, 10], [1, 1, 1], [1, 2, 3], [0, 1, 2, 6, 10, 11])
    np.testing.assert_array_equal(values, [1, 2, np.nan, np.nan, 3])
    assert np.isnan(cut(np.zeros(0, int), np.zeros(0, int), np.zeros((0,)), [0, 1])).all()
