"""The page of `keras-het report`: the tab's files, and what its routes answer, in one file."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import re

import made_training
import pytest
from test_plugin import START, application_of
from werkzeug.test import Client

from keras_het.planning.diagnosis.recording import Change, Device
from keras_het.telemetry.event_log import read_log
from keras_het.tensorboard.log_content import log_content
from keras_het.tensorboard.report_page import report_page

EVIL = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>\u2028\ud800"


def embedded(page):
    """What the log in a page says."""
    found = re.search(r'<script id="log" type="application/gzip">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None
    text = gzip.decompress(base64.b64decode(found[1])).decode()
    return json.loads(text, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    made_training.write(folder / "run", 3, 700)
    return folder


def test_the_page_has_what_the_tab_is_answered(logs):
    (run,) = read_log(logs)
    content = embedded(report_page(run.name, run.content))
    client = Client(application_of(logs))

    def answer(route, query=""):
        return client.get(f"{START}/{route}?run=run/telemetry{query}").json

    def without_messages(found):
        return {name: value for name, value in found.items() if name != "messages"}

    (listed,) = content["runs"]["runs"]
    assert listed["name"] == "run/telemetry" and listed["written"] > 0
    assert content["overview"] == answer("overview")
    for route, query in (("diagnosis", ""), ("pipeline", ""), ("lanes", "&devices=0,1,2")):
        assert content[route] == without_messages(answer(route, query))
    quantities = [each["name"] for each in content["overview"]["quantities"]]
    assert list(content["heat_map"]) == quantities
    for name, maps in content["heat_map"].items():
        for how in ("median", "highest"):
            expected = answer("heat_map", f"&quantity={name}&how={how}")
            assert maps[how] == without_messages(expected)


def test_the_page_runs_its_own_scripts_only_and_loads_nothing(logs):
    (run,) = read_log(logs)
    page = report_page(run.name, run.content)
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    texts = re.findall(
        r"<(?:style|script|script type=.module.)>(.*?)</(?:style|script)>", page, re.S
    )
    assert [len(text) > 1000 for text in texts] == [True] * 3
    for text in texts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"@import|url\(", texts[0])
    assert not re.search(r"<(link|img|iframe|base)\b|<[a-z]+ [^>]*\b(src|href)=", page)


def test_the_modules_can_be_one():
    """The page has them in one scope, without imports."""
    page = report_page("run", log_content(made_training.values(2, 40)))
    script = page.rpartition('<script type="module">')[2].partition("</script>")[0]
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names))
    assert script.endswith("render();\n")


def test_what_a_log_says_cannot_end_an_element():
    content = log_content(made_training.values(2, 200))
    recording = dataclasses.replace(
        content.recording,
        devices=tuple(Device(EVIL, n, EVIL, EVIL, EVIL) for n in range(2)),
        changes=(Change(5, EVIL, EVIL),),
    )
    evil = dataclasses.replace(
        content,
        recording=recording,
        messages=(EVIL,),
        exchanges=({"worker": EVIL, "step": 3},),
    )
    page, plain = report_page(EVIL, evil), report_page("run", content)
    page.encode()
    found = embedded(page)
    assert found["runs"]["runs"][0]["name"] == found["overview"]["devices"][0]["name"] == EVIL
    assert found["overview"]["messages"] == [EVIL]

    def shape(text):
        return re.sub(r"(application/gzip.>)[^<]*", r"\1", text)

    assert shape(page) == shape(plain)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_log_with_hardly_a_step_has_a_page(steps):
    content = embedded(report_page("run", log_content(made_training.values(3, steps))))
    assert (content["overview"]["first"], content["overview"]["last"]) == (0, steps)
    assert content["diagnosis"]["verdict"] == []


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "steps"), [(200, 5000), (1000, 300), (8, 20_000)])
def test_the_page_of_a_large_training_is_bounded(replicas, steps):
    page = report_page("run", log_content(made_training.values(replicas, steps)))
    assert len(page) < 8e6
    content = embedded(page)
    assert len(content["lanes"]["devices"]) == replicas
    columns = len(content["heat_map"]["compute"]["median"]["edges"]) - 1
    assert columns == 600 if replicas == 8 else 60 <= columns <= 300
