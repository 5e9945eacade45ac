"""A model in stages in the tab: what the routes answer, and what Chromium shows."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import made_training
import numpy as np
import pytest
from test_browser import CHROMIUM, DRIVER, served, started, until  # noqa: F401 - a fixture
from test_plugin import START, application_of
from werkzeug.test import Client

from keras_het.planning.diagnosis.recording import Device, PipelineRecord, StageRecord
from keras_het.planning.pipeline import Event, Timeline
from keras_het.telemetry.event_log import EventLog, read_log
from keras_het.tensorboard import views

DEVICES = tuple(Device(f"worker {n} GPU 0", n, "GPU") for n in range(3))
STAGES = (
    StageRecord(("embedding", "block_0"), (0,), (4,), (2.0e9,), ("block_0",)),
    StageRecord(("block_1",), (2, 1), (3, 1), (1.0e9, 1.1e9)),
)
STEPS = 40


def passes(stretch, kinds):
    """Passes one after the other on all devices, the same for each kind."""
    events: list[list[Event]] = [[], [], []]
    begins = itertools.count()
    for kind in kinds:
        for number in range(4):
            device = number % 3
            begin = next(begins) * 0.002 * stretch
            end = begin + 0.002 * stretch
            events[device].append(Event(kind, number, min(device, 1), begin, end))
    return Timeline(tuple(map(tuple, events)), 0.002 * stretch * 4 * len(kinds))


PREDICTED = passes(1.0, ("forward", "recompute", "backward", "transfer"))
MEASURED = passes(1.5, ("forward", "backward"))


def write(folder, devices=DEVICES, name="block_1"):
    log = EventLog(folder / "telemetry", devices)
    stages = (STAGES[0], dataclasses.replace(STAGES[1], layers=(name,)))
    log.write_plan(0, PipelineRecord("stage  layers", stages, PREDICTED))
    block = np.full((STEPS, 5, 3), 0.004, np.float32)
    block[:, 4] = [64, 16, 48]
    log.write_steps(0, block)
    for step in (9, 29):
        log.write_passes(step, MEASURED)
    log.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write(folder / "stages")
    made_training.write(folder / "replicas", 3, 100)
    return folder


def test_the_plan_and_the_passes_of_the_latest_step(logs):
    client = Client(application_of(logs))
    answer: Any = client.get(f"{START}/pipeline?run=stages/telemetry").json
    assert [stage["devices"] for stage in answer["stages"]] == [[0], [2, 1]]
    assert answer["stages"][0]["recomputed"] == ["block_0"]
    assert answer["devices"] == [device.name for device in DEVICES]
    assert answer["measured"]["step"] == 29
    assert answer["measured"]["events"][1][0] == ["forward", 1, 1, 0.003, 0.006]
    assert answer["predicted"]["step_seconds"] == pytest.approx(0.032)
    assert answer["predicted"]["idle"][0] == pytest.approx(0.032 - 6 * 0.002)
    assert not answer["measured"]["cut"]
    earlier: Any = client.get(f"{START}/pipeline?run=stages/telemetry&first=0&last=20").json
    assert earlier["measured"]["step"] == 9

    overview: Any = client.get(f"{START}/overview?run=stages/telemetry").json
    assert overview["pipeline"]
    # 128 samples over the two stages are 64 of a step
    assert overview["samples_per_second"] == pytest.approx(64 / 0.016, rel=1e-3)


def test_a_log_of_whole_replicas_has_no_pipeline(logs):
    client = Client(application_of(logs))
    answer: Any = client.get(f"{START}/pipeline?run=replicas/telemetry").json
    assert answer["stages"] == [] and answer["predicted"] is None
    overview: Any = client.get(f"{START}/overview?run=replicas/telemetry").json
    assert not overview["pipeline"]


def test_the_diagnosis_says_nothing_of_whole_replicas(logs):
    content = next(run.content for run in read_log(logs) if run.name.startswith("stages"))
    answer = views.diagnosis(content)
    assert answer["what_if"] is None and answer["gain"] is None
    assert "strategy.plan" in " ".join(answer["verdict"])
    json.dumps(answer, allow_nan=False)


def test_what_is_drawn_is_bounded(logs, monkeypatch):
    content = next(run.content for run in read_log(logs) if run.name.startswith("stages"))
    monkeypatch.setattr(views, "_MOST_PASSES", 6)
    answer = views.pipeline(content)["predicted"]
    assert answer["cut"]
    assert [len(events) for events in answer["events"]] == [2, 2, 2]
    assert answer["idle"][0] == pytest.approx(0.032 - 6 * 0.002)


@pytest.fixture
def page(started, logs):  # noqa: F811
    started.driver.get("about:blank")
    started.complaints()
    with served(application_of(logs)) as start:
        started.open(start)
        yield started


@pytest.mark.full
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
def test_the_tab_shows_the_plan_and_a_step(page):
    from selenium.webdriver.common.action_chains import ActionChains

    page.choose("Run", "stages/telemetry")
    until(lambda: page.is_shown("[aria-label=Pipeline]"), "the view")
    rows = page.text(".plan tbody").splitlines()
    assert len(rows) == 3 and "embedding … block_0 (2)" in rows[0] and "block_0" in rows[0]
    assert "step 29" in page.text("[aria-label=Pipeline] .note")
    lanes = page.script(
        "return [...document.querySelectorAll('.gantt-track')].map(e => e.ariaLabel)"
    )
    assert len(lanes) == 6
    assert lanes[0] == "worker 0 GPU 0, predicted, idle: 20 ms, 63 % of the step"
    kinds = page.script(
        "return [...new Set([...document.querySelectorAll('.gantt-track i')]"
        ".map(e => getComputedStyle(e).backgroundColor))].length"
    )
    assert kinds == 5  # forward, backward, recomputation, transfer, idle
    # predicted and measured have one scale
    widths = page.script(
        "return [...document.querySelectorAll('.gantt-track .gantt-idle')].map(e => e.offsetWidth)"
    )
    assert widths[0] / widths[1] == pytest.approx(0.032 / 0.024, rel=0.01)
    bar = page.driver.find_elements("css selector", ".gantt-track i:not(.gantt-idle)")[0]
    ActionChains(page.driver).move_to_element(bar).perform()
    until(lambda: "forward of micro-batch 0" in page.text(".gantt .tip"), "what the bar is")
    assert "2 ms, from 0 s to 2 ms" in page.text(".gantt .tip")
    assert not page.is_shown("[aria-label='What if it were ideal?']")
    page.choose("Run", "replicas/telemetry")
    until(lambda: not page.is_shown("[aria-label=Pipeline]"), "no plan, no view")
    assert page.is_shown("[aria-label='What if it were ideal?']")
    assert page.complaints() == []


@pytest.mark.full
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
def test_names_of_layers_are_shown_as_text(started, tmp_path):  # noqa: F811
    evil = "<img src=x onerror=document.title='evil'>"
    write(tmp_path, tuple(Device(evil, n) for n in range(3)), evil)
    with served(application_of(tmp_path)) as start:
        started.open(start)
        until(lambda: evil in started.text(".plan tbody"), "the name")
        assert started.script("return document.querySelectorAll('img').length") == 0
        assert started.driver.title != "evil"
