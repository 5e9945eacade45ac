"""Logs that were damaged: what is shown of them is right.

Data behind damage may be lost. A view is wrong where it shows another number than that of the
intact log.
"""

from __future__ import annotations

import base64
import random
import shutil
import struct
from typing import Any

import made_training
import numpy as np
import pytest
import test_pipeline_view
from test_plugin import START, application_of
from werkzeug.test import Client

from keras_het.launch.command_line import main
from keras_het.tensorboard import views

RUNS = ("replicas/telemetry", "stages/telemetry")
STEPS = 120
QUANTITIES = ("wall", "compute", "input", "sync", "other", "share", "hw.temperature")
ROUTES = (
    "overview",
    "overview?first=10&last=90",
    "diagnosis",
    "pipeline",
    "lanes?devices=0,2",
    *(f"heat_map?quantity={name}&how=highest" for name in QUANTITIES),
)


# a log, and what is done to it


def begins(content):
    found = [0]
    while found[-1] < len(content):
        found.append(found[-1] + 16 + struct.unpack_from("<Q", content, found[-1])[0])
    return found[:-1]


def flipped(content, draw):
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def other_length(content, draw):
    place = draw.choice(begins(content))
    length = draw.choice((0, 1, 100, 2**31, 2**62, draw.randrange(len(content))))
    return content[:place] + struct.pack("<Q", length) + content[place + 8 :]


def cut(content, draw):
    """Torn inside a record: a log whose last records were never written is a log."""
    whole = {0, *begins(content)}
    return content[: draw.choice([n for n in range(len(content)) if n not in whole])]


def overwritten(content, draw):
    begin, size = draw.randrange(len(content)), draw.choice((1, 16, 300, 5000))
    new = draw.choice((bytes(size), draw.randbytes(size), b"\xff" * size, b""))
    if content[begin : begin + size] == new[: len(content) - begin]:
        return flipped(content, draw)
    return content[:begin] + new + content[begin + size :]


def inserted(content, draw):
    place = draw.randrange(len(content))
    return content[:place] + draw.randbytes(draw.choice((1, 40, 4000))) + content[place:]


DAMAGE = (flipped, other_length, cut, overwritten, inserted)


def mutated(content, seed):
    draw = random.Random(seed)
    way = draw.choice(DAMAGE)
    return way.__name__, way(content, draw)


# what is shown of it


class Views:
    """All that the tab's routes answer about a training, and how the report of it ends."""

    def __init__(self, folder, run, capture):
        client = Client(application_of(folder))
        self.runs = [each["name"] for each in client.get(f"{START}/runs").json["runs"]]
        self.routes: dict[str, Any] = {}
        self.steps: dict[str, dict[int, Any]] = {}
        for route in ROUTES:
            query = f"{START}/{route}{'&' if '?' in route else '?'}run={run}"
            answer = client.get(query)
            assert answer.status_code in (200, 404), (route, answer.text)
            if answer.status_code == 200:
                self.routes[route] = answer.json
                if route.startswith("heat_map"):
                    self.steps[route] = self._cells(answer.json)
        page = str(folder / "page.html")
        arguments = ["report", str(folder), "--run", run, "--html", page, "--trace", f"{page}.json"]
        self.code = main(arguments)
        self.printed = "".join(capture.readouterr())

    @staticmethod
    def _cells(answer):
        """The values of each step."""
        values = np.frombuffer(base64.b64decode(answer["values"]), "<f4")
        cells = values.reshape(answer["rows"], -1).T
        edges = answer["edges"]
        return {
            begin: cell
            for begin, end, cell in zip(edges, edges[1:], cells, strict=False)
            if end == begin + 1
        }


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    made_training.write(folder / "replicas", 3, STEPS, keep_steps=80)
    test_pipeline_view.write(folder / "stages")
    return folder


def wrong(seen, right):
    found = [] if {*seen.runs} <= {*RUNS} else [f"runs {seen.runs}"]
    for route, steps in seen.steps.items():
        if "hw." in route:  # a sample stands for all steps up to the next one
            continue
        for step, cell in steps.items():
            cells = right.steps[route].get(step)
            # the lost part of a row of several steps is not known to be lost
            if cells is None or not np.all(np.isnan(cell) | (cell == cells)):
                found.append(f"{route}: step {step}: {cell} for {cells}")
    if seen.code and "names no devices" not in seen.printed:
        found.append(seen.printed)
    return found


def check(intact, seeds, tmp_path, capture):
    right = {run: Views(intact, run, capture) for run in RUNS}
    assert [len(views.routes) for views in right.values()] == [len(ROUTES), len(ROUTES) - 1]
    assert {views.code for views in right.values()} == {0}
    for seed in seeds:
        folder = tmp_path / "logs"
        shutil.copytree(intact, folder)
        run = RUNS[seed % 4 == 3]
        (path,) = (folder / run).iterdir()
        name, content = mutated(path.read_bytes(), seed)
        path.write_bytes(content)
        seen = Views(folder, run, capture)
        assert wrong(seen, right[run]) == [], (seed, name)
        shutil.rmtree(folder)


@pytest.mark.full
def test_no_view_of_a_damaged_log_is_wrong(intact, tmp_path, capsys):
    check(intact, range(0, 200, 10), tmp_path, capsys)


@pytest.mark.full
@pytest.mark.timeout(800)
def test_200_damaged_logs(intact, tmp_path, capsys):
    check(intact, range(200), tmp_path, capsys)


def test_an_error_of_ours_is_an_answer_that_says_so(intact, monkeypatch):
    def fail(*arguments):
        raise MemoryError("6 GiB")

    monkeypatch.setattr(views, "overview", fail)
    client = Client(application_of(intact))
    answer = client.get(f"{START}/overview?run={RUNS[0]}")
    assert (answer.status_code, answer.content_type[:10]) == (500, "text/plain")
    assert "This log cannot be shown: MemoryError('6 GiB')" in answer.text
    assert client.get(f"{START}/runs").status_code == 200
