"""A training that continues with other devices in the same log is shown as one."""

from __future__ import annotations

import dataclasses
import json

import made_training
import numpy as np
import pytest
from made_training import GENERATIONS, GLOBAL_BATCH, balanced

from keras_het.launch.command_line import main
from keras_het.planning.diagnosis.statistics import throughput
from keras_het.telemetry import event_log
from keras_het.telemetry.event_log import read_log
from keras_het.tensorboard import views

LATER = ["worker 0 GPU 0", "worker 1 GPU 0", "worker 2 GPU 0", "worker 1 GPU 0 (until step 299)"]


def content_of(folder):
    (run,) = read_log(folder)
    assert run.content.messages == ()
    return run.content


@pytest.fixture
def content(tmp_path):
    made_training.write_generations(tmp_path)
    return content_of(tmp_path)


def test_devices_are_matched_by_identity(content):
    recording = content.recording
    assert [device.name for device in recording.devices] == LATER
    hosts = [device.host for device in recording.devices]
    assert hosts == ["fast", "new", "slow", "other"]
    for first, present in GENERATIONS:
        expected = balanced(present, 300)
        for place, host in enumerate(hosts):
            found = recording.compute[first : first + 300, place]
            if host in present:
                np.testing.assert_allclose(found, expected[:, 0, present.index(host)])
            else:
                assert np.isnan(found).all()


def test_restarts_are_marked_with_who_takes_part(content):
    assert [str(each.text) for each in content.recording.changes] == [
        "restart with 2 workers, 2 replicas: 1 gone",
        "restart with 3 workers, 3 replicas: 1 new",
    ]
    assert [each.step for each in content.recording.changes] == [300, 600]
    assert [each.step for each in content.recording.generations] == [0, 300, 600]


def test_speed_is_the_sum_of_all_who_took_part(content):
    answer = views.overview(content, content)
    parts = [balanced(hosts, 300)[:, :4].sum(axis=1).mean() for _, hosts in GENERATIONS]
    assert answer["step_seconds"] == pytest.approx(np.mean(parts), rel=1e-4)
    samples = [balanced(hosts, 1)[0, 4].sum() for _, hosts in GENERATIONS]
    assert answer["samples_per_second"] == pytest.approx(sum(samples) / sum(parts), rel=1e-4)
    assert abs(sum(samples) / 3 - GLOBAL_BATCH) < 1


@pytest.mark.parametrize("number", range(3))
def test_the_verdict_is_about_the_newest_generation(content, number):
    """Of the steps that are looked at; against the others devices would look slower or faster."""
    first, hosts = GENERATIONS[number]
    part = views.between(content, 0, first + 300)
    answer = views.diagnosis(part)
    assert "No bottleneck found" in answer["verdict"][0]
    assert answer["what_if"]["steps"][0] >= first
    scores = zip(part.recording.devices, answer["scores"]["against_best"], strict=True)
    assert sorted(device.host for device, score in scores if score) == sorted(hosts)
    assert len(answer["what_if"]["by_device"]) == len(LATER)
    assert views.heat_map(part, "compute", "median") is not None


def test_a_verdict_that_waits_says_since_when(tmp_path):
    made_training.write_generations(tmp_path, [(0, ("fast", "slow"))])
    made_training.write_generations(tmp_path, [(300, ("fast",))], steps=10)
    (reason,) = views.diagnosis(content_of(tmp_path))["missing"]
    assert reason.endswith("10 of 20 (since the restart in step 300)")


def test_the_same_devices_in_another_process_are_another_generation(tmp_path, monkeypatch):
    for number, first in enumerate((0, 300, 200)):
        monkeypatch.setattr(event_log, "_PROCESS", str(number))
        made_training.write_generations(tmp_path, [(first, ("fast", "slow"))])
    recording = content_of(tmp_path).recording
    # the second one began after what was done again
    assert [(each.step, each.text) for each in recording.changes] == [
        (200, "restart with 2 workers, 2 replicas")
    ]
    assert len(recording.devices) == 2 and len(recording.steps) == 500


def test_a_log_from_before_identities_is_matched_by_names(tmp_path, monkeypatch):
    machines = made_training.machines
    monkeypatch.setattr(event_log, "_PROCESS", "")
    monkeypatch.setattr(
        made_training,
        "machines",
        lambda hosts: tuple(dataclasses.replace(d, identity="") for d in machines(hosts)),
    )
    made_training.write_generations(tmp_path)
    recording = content_of(tmp_path).recording
    assert len(recording.devices) == 3
    wall = throughput(recording.wall_of_all, recording.samples)
    assert wall.samples_per_second > 0


def test_the_report_shows_one_training(tmp_path, capsys):
    made_training.write_generations(tmp_path, GENERATIONS[:2])
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert main(["report", str(tmp_path), "--html", str(page), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "2 replicas, 600 steps" in text
    assert "step 300: restart with 2 workers, 2 replicas: 1 gone" in text
    assert "(until step 299)" not in text  # its recent steps are none
    assert "worker 1 GPU 0 (until step 299)" in trace.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
