"""The doctors of several nodes: what their links say, and what they say of each other."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from doctor_facts import A100, ALONE, CUDA_BUILD, TWO, in_cluster, tf_config

from keras_het.launch.doctor import links
from keras_het.launch.doctor.examination import report_on
from keras_het.launch.doctor.facts import FAULT, NOTE, OK, WARNING
from keras_het.launch.doctor.links import Link, Measurement, describe_node, measure_links


def test_connections(monkeypatch, ports):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening = f"127.0.0.1:{listener.getsockname()[1]}"
        assert links.reach(listening) == links.LISTENS
    assert links.reach(ports[0]) == links.REFUSED
    for error, state in (
        (socket.gaierror, links.UNKNOWN),
        (TimeoutError, links.UNREACHABLE),
    ):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert links.reach("[::1]:1") == state


NODE = describe_node(ALONE)
LINK = Link("worker 1", "b:1", links.LISTENS, True, False, 2e-4, 1.1e9, 0.01, NODE)


def of_links(link, waited=30.0):
    given = in_cluster(tf_config(TWO))
    return list(report_on(given, (), Measurement((link,), waited)).findings)


GPU_NODE = {**NODE, "device": "GPU"}


@pytest.mark.parametrize(
    ("other", "cuda", "ended", "expected"),
    [
        (GPU_NODE, "12.5", (0, ""), ""),
        (GPU_NODE, "12.5", (1, "Traceback\nRuntimeError: NCCL ...\n"), "RuntimeError: NCCL ..."),
        (GPU_NODE, "12.5", (-6, ""), "exit code -6"),
        (GPU_NODE, "12.5", None, "no answer within 120 s"),
        (GPU_NODE, "", (0, ""), None),
        (NODE, "12.5", (0, ""), None),
    ],
)
def test_nccl_is_tried_between_gpus(monkeypatch, other, cuda, ended, expected):
    given = in_cluster(tf_config(TWO))
    found = dataclasses.replace(given.tensorflow, replicas=1, cuda=cuda)
    given = dataclasses.replace(given, tensorflow=found)

    def run_program(module, environ, seconds, request):
        assert module == links._THIS_PROGRAM and json.loads(request) == json.loads(tf_config(TWO))
        if ended is None:
            raise subprocess.TimeoutExpired(module, seconds)
        return SimpleNamespace(returncode=ended[0], stderr=ended[1])

    monkeypatch.setattr(links, "run_program", run_program)
    assert links._try_nccl(given, [dataclasses.replace(LINK, node=other)]) == expected


@pytest.mark.parametrize(("said", "level"), [("", OK), ("no answer within 120 s", WARNING)])
def test_what_the_trial_of_nccl_says(said, level):
    given = in_cluster(tf_config(TWO))
    (first, *_) = report_on(given, (), Measurement((LINK,), 30.0, nccl=said)).findings
    assert first.level == level and "NCCL" in first.text and said in first.text


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, OK, "1100 MB/s"),
        ({"bytes_per_second": 10e6}, WARNING, "takes 10.0 s"),
        ({"answers": False, "refused": True}, FAULT, "lists other addresses"),
        ({"answers": False}, WARNING, "not a doctor"),
        ({"answers": False, "reached": links.REFUSED}, WARNING, "within 30 s"),
        ({"answers": False, "reached": links.UNREACHABLE}, FAULT, "does not answer"),
    ],
    ids=["well", "slow", "another cluster", "not a doctor", "silent", "unreachable"],
)
def test_what_a_link_says(changes, level, words):
    (finding,) = of_links(dataclasses.replace(LINK, **changes))
    assert finding.level == level and words in finding.text and "worker 1 (b:1)" in finding.text
    assert bool(finding.fix) == (level != OK)


def test_without_waiting_a_silent_node_is_no_problem():
    for reached in (links.LISTENS, links.REFUSED):
        (finding,) = of_links(Link("worker 1", "b:1", reached), waited=0.0)
        assert finding.level in (OK, NOTE)
    assert of_links(Link("worker 1", "b:1", links.UNKNOWN), waited=0.0) == []


@pytest.mark.parametrize(
    ("node", "ahead", "words"),
    [
        ({"tensorflow": "2.16.2"}, 0.0, "another version of TensorFlow"),
        ({"keras_het": "0.0.1"}, 0.0, "another version of keras_het"),
        ({"device": "GPU"}, 0.0, "one type of device"),
        ({}, -90.0, "90 s behind"),
    ],
)
def test_nodes_that_differ(node, ahead, words):
    link = dataclasses.replace(LINK, node={**NODE, **node}, clock_ahead_seconds=ahead)
    _, finding = of_links(link)
    assert finding.level == (WARNING if ahead else FAULT) and words in finding.text


@pytest.mark.parametrize(
    ("there", "said"),
    [([False], "on none of the GPUs of worker 1"), ([False, True], "on some of"), ([True], None)],
)
def test_nodes_whose_cards_differ_in_tensor_float_32(there, said):
    here = in_cluster(tf_config(TWO), gpus=(A100,), tensorflow=CUDA_BUILD)
    node = {**describe_node(here), "tensor_float_32": there}
    measured = Measurement((dataclasses.replace(LINK, node=node),), 30.0)
    _, *notes = report_on(here, (), measured).findings
    assert [finding.level for finding in notes] == [NOTE] * (said is not None)
    for finding in notes:
        assert said in finding.text and "enable_tensor_float_32_execution" in finding.fix


def doctors_at_once(*given, wait=20.0):
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(measure_links, given, [wait] * len(given)))


def test_doctors_measure_the_link_between_them(ports):
    cluster = {"worker": list(ports[:2])}
    here, there = (in_cluster(tf_config(cluster, index=index)) for index in range(2))
    here = dataclasses.replace(here, host="another")
    for index, measured in enumerate(doctors_at_once(here, there)):
        (link,) = measured.links
        assert link.task == f"worker {1 - index}" and link.answers and not link.refused
        assert 0 < link.latency_seconds < 5
        assert link.bytes_per_second > 1e6 and abs(link.clock_ahead_seconds) < 5
        assert (link.node["host"] == "another") == (index == 1)


@pytest.mark.full
def test_doctors_of_different_clusters_refuse_each_other(ports):
    here = in_cluster(tf_config({"worker": list(ports[:2])}))
    there = in_cluster(tf_config({"worker": list(ports[:2]), "async": ["c:1"]}, index=1))
    links = [measured.links[0] for measured in doctors_at_once(here, there, wait=3.0)]
    assert [(link.refused, link.answers) for link in links] == [(True, False)] * 2


@pytest.mark.full
def test_a_node_without_a_doctor_is_given_up(ports):
    given = in_cluster(tf_config({"worker": list(ports[:2])}))
    assert measure_links(given, 0.1).links[0].reached == links.REFUSED
    with socket.create_server(("127.0.0.1", int(ports[1].rpartition(":")[2]))):
        (link,) = measure_links(given, 0.1).links
    assert link.reached == links.LISTENS and not link.answers
    assert measure_links(ALONE, 5.0) == Measurement()


def doctors(wait, *environments):
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "keras_het", "doctor", "--json", "--wait-seconds", str(wait)],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environ in environments
    ]
    try:
        outputs = [process.communicate(timeout=550)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    return [(code, json.loads(output)) for code, output in zip(codes, outputs, strict=True)]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_doctors_of_two_workers_measure_their_link(ports):
    texts = [tf_config({"worker": list(ports[:2])}, index=index) for index in range(2)]
    for index, (code, report) in enumerate(doctors(90, *({"TF_CONFIG": text} for text in texts))):
        (link,) = report["links"]
        assert code == 0 and link["task"] == f"worker {1 - index}" and link["answers"]
        assert 0 < link["latency_seconds"] < 1
        assert link["bytes_per_second"] > 1e6 and abs(link["clock_ahead_seconds"]) < 5
        assert link["node"]["device"] == "CPU"
        assert report["tensorflow"]["kernels"] == [] or report["tensorflow"]["cuda"]
