import json
import socket

import pytest

from keras_het.launch.command_line import main
from keras_het.strategy.cluster.cluster_config import ClusterConfig
from keras_het.strategy.membership import check_is_no_summation_machine
from keras_het.summation import Summation, read_gradient_reduction


def test_what_aggregation_may_be():
    assert read_gradient_reduction("all_reduce") is None
    assert read_gradient_reduction("summation") == Summation()
    options = Summation(partition_bytes=400)
    assert read_gradient_reduction(options) is options
    with pytest.raises(ValueError, match="must be 'all_reduce', 'summation'"):
        read_gradient_reduction("tree")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"link_rates": [1.0, 0.0]}, "positive, finite"),
        ({"spare_link_rates": [float("inf")]}, "positive, finite"),
        # without those of the workers the unit is unknown: all would be summed on one machine
        ({"spare_link_rates": [1.25e9]}, "Give both in the same unit"),
        ({"link_rates": "measured", "spare_link_rates": [1.0]}, "Give both in the same unit"),
        ({"link_rates": "fast"}, 'numbers, or "measured"'),
        ({"partition_bytes": 3}, "at least 4"),
        ({"partition_bytes": 4_096_004}, "at most 4096000"),
        ({"partitions_in_flight": 0}, "at least 1"),
        ({"timeout_seconds": 0.0}, "above 0"),
    ],
)
def test_wrong_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        Summation(**settings)


def test_rates_are_one_for_each_machine():
    options = Summation(link_rates=[2.0, 4.0])
    assert options.worker_rates(2) == (2.0, 4.0)
    assert options.spare_rates(2) == (3.0, 3.0)
    assert Summation().spare_rates(1) == (1.0,)
    with pytest.raises(ValueError, match=r"one rate per worker\. Received: 2 rates"):
        options.worker_rates(3)
    with pytest.raises(ValueError, match="one rate per spare machine"):
        Summation(link_rates=[1.0], spare_link_rates=[1.0]).spare_rates(2)


def test_messages_are_neither_small_nor_large():
    assert Summation().elements_per_message(1000, 4) == 32_768 // 4
    assert Summation().elements_per_message(10**10, 4) == 4_096_000 // 4
    assert Summation().elements_per_message(128 * 10**5, 4) == 10**5
    assert Summation(partition_bytes=16).elements_per_message(10**9, 4) == 4


def test_a_summation_machine_does_not_train():
    config = ClusterConfig(None, ("a:1", "b:1"), None, "summation", 0, summation_machines=("s:1",))
    with pytest.raises(RuntimeError, match="sums gradients of the workers and does not train"):
        check_is_no_summation_machine(config)
    check_is_no_summation_machine(None)


@pytest.mark.parametrize(
    ("secret", "message"),
    [("", "needs one shared secret"), ("0123456789abcdef", "somebody listens there")],
)
def test_a_wrong_start_of_a_machine_is_one_line_of_error(monkeypatch, capsys, secret, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"worker": ["a:1", "b:1"], "summation": [address]}
        task = {"type": "summation", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        monkeypatch.setenv("KERAS_HET_SECRET", secret)
        monkeypatch.delenv("KERAS_HET_SECRET_FILE", raising=False)
        assert main(["summation-server"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("[keras-het] error: ") and message in line]
