"""Logs that were damaged, and logs made to do harm: what is shown of them is right.

Data behind damage may be lost. A view is wrong where it shows another number than that of the
intact log.
"""

from __future__ import annotations

import base64
import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from typing import Any

import made_training
import numpy as np
import pytest
import tensorflow as tf
import test_pipeline_view
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.context import RequestContext
from test_plugin import START, Reader, application_of
from werkzeug.test import Client

from keras_het.launch.command_line import main
from keras_het.telemetry.event_files import read_log
from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.plugin import Histories

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
# A value that claims 10^8 numbers is an array of 400 MB for TensorBoard, which has it read.
MOST_SECONDS, MOST_KIB = 2.0, 2**20


# a log, and what is done to it


def framed(data, length=None):
    """A record, which may claim another length than it has."""
    begin = struct.pack("<Q", len(data) if length is None else length)
    crcs = [struct.pack("<I", masked_crc32c(each)) for each in (begin, data)]
    return b"".join([begin, crcs[0], data, crcs[1]])


def record(tag, value, step=60, wall_time=2000000000.0):
    """A record that is whole, whatever it says."""
    return record_of(tag, tf.make_tensor_proto(value), step, wall_time)


def record_of(tag, tensor, step=60, wall_time=2000000000.0):
    summary = tf.compat.v1.Summary(value=[tf.compat.v1.Summary.Value(tag=tag, tensor=tensor)])
    event = tf.compat.v1.Event(step=step, wall_time=wall_time, summary=summary)
    return framed(event.SerializeToString())


def claiming(tag, shape):
    """A record with one value, of which the shape says that there are many."""
    tensor = tf.make_tensor_proto(np.float32(0.5))
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    return record_of(tag, tensor)


def block(value=0.01, steps=5):
    return np.full((steps, len(log_format.ROWS), 3), value, np.float32)


def setup(devices, **more):
    content = {"version": 1, "devices": devices, "hardware": [], **more}
    return json.dumps(content).replace('"1e999"', "1e999").encode()


DEVICE = {"name": "a", "worker": 0}
DEEP = b"[" * 200_000
HOSTILE: dict[str, Callable[[], bytes]] = {
    "time inf": lambda: record(log_format.STEPS, block(), wall_time=np.inf),
    "time nan": lambda: record(log_format.STEPS, block(), wall_time=np.nan),
    "time -1": lambda: record(log_format.CHANGES, b"{}", wall_time=-1.0),
    "time 1e300": lambda: record(log_format.SETUP, setup([DEVICE]), wall_time=1e300),
    "step -1": lambda: record(log_format.STEPS, block(), step=-1),
    "step 2^62": lambda: record(log_format.STEPS, block(), step=2**62),
    "worker 1e999": lambda: record(log_format.SETUP, setup([{**DEVICE, "worker": "1e999"}])),
    "worker -1": lambda: record(log_format.SETUP, setup([{**DEVICE, "worker": -1}])),
    "worker of 4,000 digits": lambda: record(
        log_format.SETUP, setup([{**DEVICE, "worker": "9" * 4000}])
    ),
    "no devices": lambda: record(log_format.SETUP, setup([])),
    "devices of a text": lambda: record(log_format.SETUP, setup("devices")),
    "100,000 devices": lambda: record(log_format.SETUP, setup([DEVICE] * 100_000)),
    "long texts": lambda: record(log_format.SETUP, setup([{**DEVICE, "name": "n" * 5_000_000}])),
    "version 1e400": lambda: record(log_format.SETUP, setup([DEVICE], version="1e999")),
    "deep setup": lambda: record(log_format.SETUP, DEEP),
    "deep changes": lambda: record(log_format.CHANGES, DEEP),
    "deep exchanges": lambda: record(log_format.ASYNC, DEEP),
    "deep plan": lambda: record(log_format.PLAN, DEEP),
    "infinite exchange": lambda: record(log_format.ASYNC, b'{"worker": 1, "staleness": 1e999}'),
    "huge exchange": lambda: record(log_format.ASYNC, b'{"staleness": ' + b"9" * 4000 + b"}"),
    "changes of a number": lambda: record(log_format.CHANGES, b"7"),
    "no JSON": lambda: record(log_format.CHANGES, b"\xff\xfe{"),
    "tag of 5,000 digits": lambda: record(f"{log_format.THINNED}{'9' * 5000}", block()[:, None]),
    "tag of 18 digits": lambda: record(f"{log_format.THINNED}{'9' * 18}", block()[:, None]),
    "claims 10^8 values": lambda: claiming(log_format.STEPS, [10**8 // 15, 5, 3]),
    "claims 10^12 values": lambda: claiming(log_format.HARDWARE_SAMPLES, [10**6, 10**6]),
    "claims 10^8 curves": lambda: claiming("heterogeneous/step_seconds", [10**8]),
    "claims nothing": lambda: record(log_format.STEPS, block()[:0]),
    "infinite block": lambda: record(log_format.STEPS, block(np.inf)),
    "huge block": lambda: record(log_format.STEPS, block(1e38)),
    "infinite hardware": lambda: record(log_format.HARDWARE_SAMPLES, np.full((3, 3), np.inf)),
    "integers": lambda: record(log_format.STEPS, block(1).astype(np.int64)),
    "text for a block": lambda: record(log_format.STEPS, b"no numbers"),
    "many texts": lambda: record(log_format.SETUP, np.array([b"a", b"b"])),
    "no event": lambda: framed(b"\xff" * 100),
}
HOSTILE_LENGTHS = (2**20, 2**31, 2**40, 2**62, 2**64 - 1)


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
    if seed % 2:
        way = draw.choice(DAMAGE)
        return way.__name__, way(content, draw)
    name = [*HOSTILE][seed // 2 % len(HOSTILE)]
    place = draw.choice([*begins(content)[1:], len(content)])
    return name, content[:place] + HOSTILE[name]() + content[place:]


# what is shown of it


class Views:
    """All that the tab's routes answer about a training, and how the report of it ends."""

    def __init__(self, folder, run, capture):
        self.cpu_seconds = 0.0
        client = Client(application_of(folder))
        self.runs = [each["name"] for each in client.get(f"{START}/runs").json["runs"]]
        self.routes: dict[str, Any] = {}
        self.steps: dict[str, dict[int, Any]] = {}
        for route in ROUTES:
            query = f"{START}/{route}{'&' if '?' in route else '?'}run={run}"
            answer = self._timed(lambda query=query: client.get(query))  # type: ignore[misc]
            assert answer.status_code in (200, 404), (route, answer.text)
            if answer.status_code == 200:
                self.routes[route] = answer.json
                if route.startswith("heat_map"):
                    self.steps[route] = self._cells(answer.json)
        page = str(folder / "page.html")
        arguments = ["report", str(folder), "--run", run, "--html", page, "--trace", f"{page}.json"]
        self.code = self._timed(lambda: main(arguments))
        self.printed = "".join(capture.readouterr())

    def _timed(self, call):
        start = time.process_time()
        result = call()
        self.cpu_seconds = max(self.cpu_seconds, time.process_time() - start)
        return result

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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        folder = tmp_path / "logs"
        shutil.copytree(intact, folder)
        run = RUNS[seed % 4 == 3]
        (path,) = (folder / run).iterdir()
        name, content = mutated(path.read_bytes(), seed)
        path.write_bytes(content)
        seen = Views(folder, run, capture)
        assert wrong(seen, right[run]) == [], (seed, name)
        assert seen.cpu_seconds < MOST_SECONDS, (seed, name)
        shutil.rmtree(folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < MOST_KIB


def test_no_view_of_a_damaged_log_is_wrong(intact, tmp_path, capsys):
    check(intact, range(0, 400, 21), tmp_path, capsys)


@pytest.mark.full
@pytest.mark.timeout(800)
@pytest.mark.parametrize("first", [0, 200])
def test_400_damaged_logs(intact, tmp_path, capsys, first):
    check(intact, range(first, first + 200), tmp_path, capsys)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_made_to_do_harm_costs_nothing_else(intact, tmp_path, name):
    shutil.copytree(intact, tmp_path / "logs")
    right, _ = read_log(intact)
    (path,) = (tmp_path / "logs" / RUNS[0]).iterdir()
    path.write_bytes(path.read_bytes() + HOSTILE[name]())
    run, other = read_log(tmp_path / "logs")
    of_tab = Histories(Reader(tmp_path / "logs").provider).read(RequestContext(), "", RUNS[0])
    for content in (run.content, of_tab):
        np.testing.assert_array_equal(content.recording.wall, right.recording.wall)
        assert content.recording.devices == right.recording.devices
        assert content.recording.changes == right.recording.changes
        assert content.exchanges == right.content.exchanges
    assert len(run.content.messages) == (name != "no event")
    assert other.content.messages == ()


@pytest.mark.parametrize("length", HOSTILE_LENGTHS)
def test_a_record_that_claims_to_be_long_ends_its_file(intact, tmp_path, length):
    shutil.copytree(intact, tmp_path / "logs")
    right, _ = read_log(intact)
    (path,) = (tmp_path / "logs" / RUNS[0]).iterdir()
    path.write_bytes(path.read_bytes() + framed(b"data", length))
    run, _ = read_log(tmp_path / "logs")
    np.testing.assert_array_equal(run.recording.wall, right.recording.wall)


def test_an_error_of_ours_is_an_answer_that_says_so(intact, monkeypatch):
    def fail(*arguments):
        raise MemoryError("6 GiB")

    monkeypatch.setattr(views, "overview", fail)
    client = Client(application_of(intact))
    answer = client.get(f"{START}/overview?run={RUNS[0]}")
    assert (answer.status_code, answer.content_type[:10]) == (500, "text/plain")
    assert "This log cannot be shown: MemoryError('6 GiB')" in answer.text
    assert client.get(f"{START}/runs").status_code == 200
