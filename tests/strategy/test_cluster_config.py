import json
import re

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from keras_het.strategy.cluster.cluster_config import ClusterConfig, read_cluster_config


def read(config):
    text = config if isinstance(config, str) else json.dumps(config)
    return read_cluster_config({"TF_CONFIG": text})


def config_of(cluster, task_type="worker", index=0, **others):
    return {"cluster": cluster, "task": {"type": task_type, "index": index}, **others}


TWO_WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"cluster": {}}'])
def test_no_cluster_means_one_process(text):
    assert read(text) is None
    assert read_cluster_config({}) is None
    assert read({"cluster": {}, "task": {"type": "worker", "index": 0}}) is None


def test_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config_of(TWO_WORKERS, index=1)))
    config = read_cluster_config()
    assert config is not None
    assert config.worker_index == 1


def test_evaluator_is_a_cluster_of_its_own():
    listed = read(config_of({**TWO_WORKERS, "evaluator": ["e:5"]}, "evaluator"))
    assert listed.is_evaluator
    assert (listed.num_workers, listed.worker_index, listed.is_chief) == (1, 0, True)
    assert listed.evaluator == "e:5"
    unlisted = read(config_of(TWO_WORKERS, "evaluator"))
    assert unlisted.task_name == "/job:evaluator/replica:0/task:0"
    assert read(config_of({**TWO_WORKERS, "evaluator": ["e:5"]})).num_workers == 2


def test_forms_that_tensorflow_accepts():
    assert read(config_of(TWO_WORKERS, index="1")).task_index == 1
    assert read(config_of({"worker": {"1": "b:2", "0": "a:1"}})).workers == ("a:1", "b:2")
    assert read(config_of(TWO_WORKERS, rpc_layer="grpc")).rpc_layer == "grpc"
    assert read(config_of({"worker": ["[::1]:80"]})).workers == ("[::1]:80",)
    cloud = config_of(TWO_WORKERS, environment="cloud", job="{}")
    cloud["task"].update(trial="", cloud="x")
    assert read(cloud).num_workers == 2


MALFORMED = {
    "invalid JSON": (
        "{'cluster': 1}",
        r"not valid JSON: .* line 1 column 2.*\{'cluster': 1\}.*double quotes",
    ),
    "nested": ("[" * 10_000, r"not valid JSON: .*Received: TF_CONFIG='\["),
    "trailing comma": ('{"cluster": {},\n}', r"line [12] column"),
    "not an object": ("[1, 2]", r"must be a JSON object. Received: '\[1, 2\]' \(list\)"),
    "no cluster": ({"task": {"type": "worker", "index": 0}}, 'has a "task" but no "cluster"'),
    "no task": (
        {"cluster": TWO_WORKERS},
        r'"task" must say which task this process is.*"task": None and jobs \[\'worker\'\]',
    ),
    "cluster is a list": (config_of(["a:1"]), r'"cluster" must be an object.*\[\'a:1\'\]'),
    "cluster is an empty list": (config_of([]), '"cluster" must be an object'),
    "cluster is null": (config_of(None), '"cluster" must be an object'),
    "task is a string": (
        {"cluster": TWO_WORKERS, "task": "worker"},
        '"task" must say which task this process is. Received: "task": \'worker\'',
    ),
    "unknown key of a task": (
        {"cluster": TWO_WORKERS, "task": {"type": "worker", "index": 0, "id": 0}},
        r"\['id'\]; expected only \['type', 'index'",
    ),
    "unknown key": (config_of(TWO_WORKERS, model_dir="x"), r"unknown keys.*\['model_dir'\]"),
    "task without type": (
        {"cluster": TWO_WORKERS, "task": {"index": 0}},
        r"must say which task.*Received: \"task\": {'index': 0}",
    ),
    "task without index": (
        {"cluster": TWO_WORKERS, "task": {"type": "worker"}},
        r"must say which task.*Received: \"task\": {'type': 'worker'}",
    ),
    "type not in cluster": (
        config_of(TWO_WORKERS, "chief"),
        r"not a job of its cluster. Received: type='chief', cluster with the jobs \['worker'\]",
    ),
    "type is a number": (config_of(TWO_WORKERS, 3), "type=3"),
    "type is a list": (config_of(TWO_WORKERS, ["worker"]), r"type=\['worker'\]"),
    "index out of range": (
        config_of(TWO_WORKERS, index=2),
        r"index is out of range.*index=2; expected 0 to 1.*Indices start at 0",
    ),
    "chief counted": (
        config_of({"chief": ["c:1"], **TWO_WORKERS}, index=2),
        r"expected 0 to 1.*a chief is not counted",
    ),
    "index negative": (config_of(TWO_WORKERS, index=-1), "whole number.*Received: -1"),
    "index float": (config_of(TWO_WORKERS, index=1.0), r"Received: 1.0 \(float\)"),
    "index boolean": (config_of(TWO_WORKERS, index=True), r"Received: True \(bool\)"),
    "index text": (config_of(TWO_WORKERS, index="one"), r"Received: 'one' \(str\)"),
    "index null": (config_of(TWO_WORKERS, index=None), "Received: None"),
    "second evaluator": (
        config_of({**TWO_WORKERS, "evaluator": ["e:1"]}, "evaluator", 1),
        "out of range.*index=1; expected 0 to 0",
    ),
    "duplicate address": (
        config_of({"worker": ["a:1", "a:1"]}),
        r"lists an address twice. Received: 'a:1' for \"worker\" 0 and for \"worker\" 1",
    ),
    "duplicate between jobs": (
        config_of({"chief": ["a:1"], "worker": ["a:1"]}),
        r"for \"chief\" 0 and for \"worker\" 0",
    ),
    "no port": (
        config_of({"worker": ["a:1", "host-b"]}),
        r"job \"worker\", task 1 has a bad address. Received: 'host-b'; expected 'host:port' as in "
        r"'host-a:12345' or '\[::1\]:12345', with a port from 1 to 65535 and no scheme",
    ),
    **{
        name: (
            config_of({"worker": [address]}),
            f"bad address. Received: {re.escape(repr(address))}",
        )
        for name, address in {
            "empty port": "a:",
            "no host": ":1",
            "bracketed host without port": "[::1]",
            "bare IPv6": "::1:80",
            "port 0": "a:0",
            "port too large": "a:65536",
            "port text": "a:http",
            "scheme": "grpc://a:1",
            "white space": "a:1 ",
            "address is a number": 12345,
        }.items()
    },
    "worker list empty": (config_of({"worker": []}), r'job "worker" has no address'),
    "worker list empty beside a chief": (
        config_of({"chief": ["a:1"], "worker": []}, "chief"),
        'job "worker" has no address',
    ),
    "job is a string": (config_of({"worker": "a:1"}), "must be a list of addresses.*'a:1'"),
    "job with a gap": (
        config_of({"worker": {"0": "a:1", "2": "b:1"}}),
        "task 1 has a bad address. Received: None",
    ),
    "two chiefs": (
        config_of({"chief": ["a:1", "b:1"]}, "chief"),
        r'"chief" may have one task only. Received: 2 addresses',
    ),
    "two evaluators": (
        config_of({**TWO_WORKERS, "evaluator": ["e:1", "f:1"]}),
        '"evaluator" may have one task only',
    ),
    "a service for nobody": (
        config_of({"ps": ["p:1", "q:1"], **TWO_WORKERS}),
        r"nobody who exchanges with it.*with roles=\"auto\"",
    ),
    "nobody to exchange with": (
        config_of({"async": ["p:1"]}, task={"type": "async", "index": 0}),
        'a job "async" but nobody to exchange with',
    ),
    "unknown job": (
        config_of({"workers": ["a:1"]}),
        "unknown job. Received: 'workers'; expected only the jobs",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    config, message = MALFORMED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read(config)


_host = st.from_regex(r"[a-z][a-z0-9\-]{0,8}(\.[a-z]{1,4})?", fullmatch=True)
_address = st.builds("{}:{}".format, _host, st.integers(1, 65535))


@st.composite
def valid_configs(draw):
    addresses = draw(st.lists(_address, min_size=1, max_size=7, unique=True))
    cluster = {}
    for job in ("chief", "evaluator"):
        if len(addresses) > 1 and draw(st.booleans()):
            cluster[job] = [addresses.pop()]
    cluster["worker"] = addresses
    task_type = draw(st.sampled_from(sorted({*cluster, "evaluator"})))
    index = draw(st.integers(0, len(cluster.get(task_type, [""])) - 1))
    if draw(st.booleans()):
        cluster["worker"] = {str(number): a for number, a in enumerate(addresses)}
    others = draw(st.sampled_from([{}, {"rpc_layer": "grpc"}, {"environment": "cloud"}]))
    return config_of(cluster, task_type, draw(st.sampled_from([index, str(index)])), **others)


@examples(150)
@given(valid_configs())
def test_agrees_with_tensorflow(config):
    tf = pytest.importorskip("tensorflow")
    from tensorflow.python.distribute import multi_worker_util

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        ours = read_cluster_config()
        spec = resolver.cluster_spec()
        place = (spec, resolver.task_type, resolver.task_id)
    assert ours is not None
    assert ours.as_cluster_dict() == spec.as_dict()
    assert (ours.task_type, ours.task_index) == place[1:]
    assert ours.is_chief == multi_worker_util.is_chief(*place)
    assert ours.worker_index == multi_worker_util.id_in_cluster(*place)
    if ours.task_type in spec.jobs:
        assert ours.num_workers == multi_worker_util.worker_count(spec, ours.task_type)
        address = ours.as_cluster_dict()[ours.task_type][ours.task_index]
        assert address == spec.task_address(*place[1:])
    if ours.is_chief and not ours.is_evaluator:
        assert ours.task_name == multi_worker_util.collective_leader(*place)


@examples(300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda values: (
            st.lists(values, max_size=3)
            | st.dictionaries(
                st.sampled_from(["cluster", "task", "worker", "chief", "type", "index", "0"]),
                values,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_never_fails_in_another_way(config):
    try:
        result = read(config)
    except ValueError as error:
        assert "TF_CONFIG" in str(error)
    else:
        assert result is None or isinstance(result, ClusterConfig)


@pytest.mark.parametrize(
    ("extra", "environ", "expected"),
    [
        ({}, {}, "a:2"),
        ({"chief": ["c:70"]}, {}, "c:71"),
        ({}, {"KERAS_HET_SERVICE_ADDRESS": "q:6"}, "q:6"),
    ],
)
def test_address_of_the_parameter_service(extra, environ, expected):
    cluster = {"worker": ["a:1", "b:1"], "async": ["s:1", "t:1"], **extra}
    config = read(config_of(cluster, "async", 1))
    assert config.service_address(environ) == expected
    assert config.is_async_worker and not config.is_chief
    assert config.async_workers == ("s:1", "t:1")
    assert config.num_workers == 1
    assert config.task_name == "/job:async/replica:0/task:1"


def test_async_workers_are_no_part_of_the_sync_group():
    cluster = {"worker": ["a:1", "b:1"], "async": ["s:1"]}
    config = read(config_of(cluster))
    assert config.num_workers == 2 and config.is_chief
    assert config.as_cluster_dict() == cluster


@pytest.mark.parametrize("task", ["ps", "async"])
def test_async_workers_alone(task):
    cluster = {"ps": ["p:5"], "async": ["s:1", "t:1"]}
    config = read(config_of(cluster, task))
    assert config.service_address({}) == "p:5"
    assert not config.has_sync_group and config.num_workers == 1
    assert config.is_parameter_server == config.is_chief == (task == "ps")


@pytest.mark.parametrize(
    ("jobs", "task", "serves_only"),
    [
        (["ps", "async"], 0, False),  # runs the async workers' script
        (["ps", "async"], 1, True),
        (["ps", "async", "worker"], 0, True),
    ],
)
def test_tasks_that_only_serve(jobs, task, serves_only):
    addresses = {"ps": ["p:5", "q:5"], "async": ["s:1"], "worker": ["a:1"]}
    cluster = {job: addresses[job] for job in jobs}
    config = read(config_of(cluster, "ps", task))
    assert config.is_serving_only == serves_only and config.is_chief != serves_only
    assert config.service_addresses({}) == ("p:5", "q:5")
    assert config.service_addresses({"KERAS_HET_SERVICE_ADDRESS": "r:6"}) == ("r:6", "q:5")
    assert config.as_cluster_dict() == cluster


def test_a_wrong_service_address():
    config = read(config_of({"worker": ["a:1"], "async": ["s:1"]}))
    with pytest.raises(ValueError, match="KERAS_HET_SERVICE_ADDRESS"):
        config.service_address({"KERAS_HET_SERVICE_ADDRESS": "no port"})


def test_summation_machines_are_no_part_of_the_sync_group():
    cluster = {"worker": ["a:1", "b:1"], "summation": ["s:1", "t:1"]}
    machine = read(config_of(cluster, "summation", 1))
    assert machine.is_summation_machine and not machine.is_chief
    assert machine.summation_machines[machine.task_index] == "t:1" and machine.num_workers == 1
    assert machine.as_cluster_dict() == cluster
    worker = read(config_of(cluster, index=1))
    assert not worker.is_summation_machine and worker.num_workers == 2
    assert worker.summation_machines == ("s:1", "t:1")
