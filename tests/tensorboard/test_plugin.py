"""The plugin in TensorBoard's own application: routes, refusals, what loads it."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_training
import numpy as np
import pytest
from tensorboard.backend import application
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from werkzeug.test import Client

from keras_het.telemetry.event_log import EventLog
from keras_het.tensorboard import plugin as plugin_module
from keras_het.tensorboard.loader import HetLoader
from keras_het.tensorboard.plugin import HetPlugin

ROOT = Path(__file__).parents[2]
START = "/data/plugin/keras_het"


class Reader:
    """What TensorBoard has read of the logs below a folder."""

    def __init__(self, folder):
        self._folder = str(folder)
        self._read = plugin_event_multiplexer.EventMultiplexer(
            tensor_size_guidance={"keras_het": 0}
        )
        self.provider = data_provider.MultiplexerDataProvider(self._read, self._folder)
        self.read_new()

    def read_new(self):
        self._read.AddRunsFromDirectory(self._folder)
        with contextlib.suppress(Exception):  # TensorBoard continues, too
            self._read.Reload()

    @property
    def application(self):
        """TensorBoard's application with the plugin."""
        context = base_plugin.TBContext(logdir=self._folder, data_provider=self.provider)
        return application.TensorBoardWSGI([HetPlugin(context)], data_provider=self.provider)


def application_of(folder):
    return Reader(folder).application


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    made_training.write(folder / "run", 3, 200)
    return folder


@pytest.fixture(scope="module")
def client(logs):
    return Client(application_of(logs))


def test_the_tab_is_active_where_there_is_data(client, tmp_path):
    listed = client.get("/data/plugins_listing").json["keras_het"]
    assert listed["enabled"]
    assert listed["tab_name"] == "Heterogeneous"
    empty = Client(application_of(tmp_path))
    assert not empty.get("/data/plugins_listing").json["keras_het"]["enabled"]
    assert empty.get(f"{START}/runs").json == {"runs": []}


@pytest.mark.parametrize(
    "route",
    [
        "runs",
        "overview?run=run/telemetry",
        "overview?run=run/telemetry&first=10&last=20",
        "diagnosis?run=run/telemetry",
        "heat_map?run=run/telemetry&quantity=share&how=highest&columns=7",
        "lanes?run=run/telemetry&devices=0,2",
        "lanes?run=run/telemetry",
    ],
)
def test_routes(client, route, caplog):
    answer = client.get(f"{START}/{route}")
    assert answer.status_code == 200
    assert answer.json
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "In 3.0, this warning" not in caplog.text


def test_a_log_is_shown_while_it_grows_and_after_a_restart(tmp_path):
    reader = Reader(tmp_path)
    client = Client(reader.application)
    devices = made_training.devices_of(3)
    block = made_training.times(devices, 60)
    for first in (0, 30):  # the second process goes back to an earlier step
        log = EventLog(tmp_path / "telemetry", devices, first_step=first)
        for start in range(first, first + 40, 20):
            log.write_steps(start, block[:20] + start)
            log.flush()
            reader.read_new()
            answer: Any = client.get(f"{START}/overview?run=telemetry").json
            assert (answer["first"], answer["last"]) == (0, start + 20)
            assert answer["messages"] == []
    lanes: Any = client.get(f"{START}/lanes?run=telemetry&devices=0&first=20&last=40").json
    shares = np.frombuffer(base64.b64decode(lanes["share"]), "<f4")
    np.testing.assert_allclose(shares[[9, 10]], [block[9, 4, 0] + 20, block[0, 4, 0] + 30])


def test_a_training_is_read_again_only_when_it_has_grown(tmp_path):
    reader = Reader(tmp_path)
    histories, context = plugin_module.Histories(reader.provider), RequestContext()
    log = EventLog(tmp_path / "telemetry", made_training.devices_of(2))
    found = []
    for step in (0, 10):
        log.write_steps(step, np.ones((10, 5, 2)))
        log.flush()
        reader.read_new()
        found += [histories.read(context, "", "telemetry") for _ in range(2)]
    assert found[0] is found[1] and found[2] is found[3]
    assert [len(each.recording.steps) for each in found] == [10, 10, 20, 20]


def test_what_is_read_at_once_is_bounded(tmp_path, monkeypatch):
    made_training.write(tmp_path, 2, 1000)
    histories = plugin_module.Histories(Reader(tmp_path).provider)
    monkeypatch.setattr(plugin_module, "_MOST_BYTES", 10 * made_training.BLOCK * 5 * 2 * 4)
    content = histories.read(RequestContext(), "", "telemetry")
    assert len(content.recording.steps) == 10 * made_training.BLOCK


def test_a_series_that_tensorboard_cannot_read_costs_itself_only(tmp_path):
    made_training.write(tmp_path, 2, 40)
    provider = Reader(tmp_path).provider
    read = provider.read_tensors

    def fail(*arguments, run_tag_filter, **options):
        if "keras_het/hardware" in run_tag_filter.tags:
            raise MemoryError("3.6 TiB")
        return read(*arguments, run_tag_filter=run_tag_filter, **options)

    provider.read_tensors = fail
    content = plugin_module.Histories(provider).read(RequestContext(), "", "telemetry")
    assert len(content.recording.steps) == 40
    assert content.messages == ("keras_het/hardware cannot be read: MemoryError('3.6 TiB')",)


def test_lanes_are_of_few_devices(tmp_path):
    made_training.write(tmp_path, 30, 20)
    every = ",".join(map(str, range(30)))
    answer: Any = Client(application_of(tmp_path)).get(
        f"{START}/lanes?run=telemetry&devices={every}"
    )
    assert answer.json["devices"] == list(range(24))


@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("overview", 404),
        ("overview?run=other", 404),
        ("heat_map?run=run/telemetry&quantity=secret", 404),
        ("heat_map?run=run/telemetry&how=mean", 400),
        ("heat_map?run=run/telemetry&columns=many", 400),
        ("overview?run=run/telemetry&first=1e3", 400),
        ("overview?run=run/telemetry&last=99999999999999999999", 400),
        ("lanes?run=run/telemetry&devices=a", 400),
        (f"lanes?run=run/telemetry&devices={'1,' * 2000}", 400),
        (f"overview?run={'r' * 5000}", 400),
        ("static/", 404),
        ("static/nothing.js", 404),
        ("static/../plugin.py", 404),
        ("static/%2e%2e/plugin.py", 404),
        ("static/..%2fplugin.py", 404),
        ("static//etc/passwd", 404),
        ("static/static/index.js", 404),
        ("static/__init__.py", 404),
    ],
)
def test_refusals(client, route, status, caplog):
    answer = client.get(f"{START}/{route}")
    assert answer.status_code == status
    assert answer.content_type.startswith("text/plain")
    assert "In 3.0, this warning" not in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("route", ["runs", "overview?run=run/telemetry", "static/index.js"])
def test_only_reading_is_allowed(client, method, route):
    answer = client.open(f"{START}/{route}", method=method)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_files_of_the_page(client):
    folder = ROOT / "keras_het" / "tensorboard" / "static"
    kinds = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
    for path in folder.iterdir():
        answer = client.get(f"{START}/static/{path.name}")
        assert answer.data == path.read_bytes()
        assert answer.content_type.startswith(kinds[path.suffix])


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text():
    folder = ROOT / "keras_het" / "tensorboard" / "static"
    for path in folder.glob("*.js"):
        text = path.read_text("utf-8")
        assert not re.search(r"\beval\(|new Function|document\.write", text), path.name
        if not path.name.startswith("uPlot"):
            assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent", text), path.name
        for imported in re.findall(r'from "(.+?)"', text):
            assert (folder / imported).is_file()


def test_what_tensorboard_imports_at_its_start_is_light():
    code = (
        "import sys, keras_het.tensorboard.loader as loader\n"
        "ours = {name for name in sys.modules if name.startswith('keras_het.')}\n"
        "allowed = {'keras_het.' + n for n in "
        "('tensorboard', 'tensorboard.loader', 'keras_backend', 'seen_versions')}\n"
        "print(sorted(ours - allowed), 'numpy' in sys.modules)\n"
        "import keras_het.tensorboard.plugin\n"
        "print([n for n in ('tensorflow', 'keras') if n in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("[] ")
    assert second == "[]"


def test_the_entry_point_names_the_loader():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    found = re.search(r"tensorboard_plugins\]\n(\w+) = \"(.+)\"", text)
    assert found is not None
    point = importlib.metadata.EntryPoint(*found.groups(), group="tensorboard_plugins")
    assert point.load() is HetLoader
    assert point.name == HetPlugin.plugin_name


def test_the_loader_keeps_steps_unless_the_user_says_how_many():
    flags = SimpleNamespace(samples_per_plugin={"images": 3})
    HetLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"images": 3, "keras_het": 30_000}
    flags = SimpleNamespace(samples_per_plugin={"keras_het": 9})
    HetLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"keras_het": 9}


def test_a_fault_of_ours_stops_no_tensorboard(monkeypatch, caplog):
    def fail(context):
        raise RuntimeError("no numpy")

    monkeypatch.setattr(plugin_module, "HetPlugin", fail)
    with caplog.at_level(logging.WARNING, "keras_het"):
        assert HetLoader().load(None) is None
        HetLoader().fix_flags(SimpleNamespace())
    assert "no numpy" in caplog.text
    assert "may leave out steps" in caplog.text
