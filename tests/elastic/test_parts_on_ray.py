"""What the trainer decides, without a cluster."""

from __future__ import annotations

import json
import math
import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: the extra `ray`")

from ray.train import (
    ControllerError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision

from keras_het.ray import KerasTrainer, cluster, group, trainer
from keras_het.ray.cluster import Place, environments
from keras_het.ray.group import LeavingError, TrainFunctionError

LOST = RuntimeError("the actor died")


def places(*rows):
    return [
        Place(node, f"{node}:{port}", f"{node}:{port + 100}", is_async, gpus, cpus=8)
        for port, (node, is_async, gpus) in enumerate(rows, 1000)
    ]


def test_workers_take_the_gpus_of_their_node_in_turn():
    found = environments(
        places(("a", False, ("G0", "G1")), ("b", False, ()), ("a", False, ("G0", "G1"))), threads=3
    )
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == ["G0", "-1", "G1"]
    assert {each["TF_NUM_INTRAOP_THREADS"] for each in found} == {"3"}
    configs = [json.loads(each["TF_CONFIG"]) for each in found]
    assert all(each["cluster"] == {"worker": ["a:1000", "b:1001", "a:1002"]} for each in configs)
    assert [each["task"] for each in configs] == [{"type": "worker", "index": n} for n in range(3)]


def test_the_cpus_of_a_node_are_dealt_out():
    rows = [("a", False, ()), ("b", False, ()), ("a", False, ())]
    threads = [each["TF_NUM_INTRAOP_THREADS"] for each in environments(places(*rows), None)]
    assert threads == ["4", "8", "4"]


def test_a_gpu_that_ray_has_chosen_stays():
    (found,) = environments(places(("a", False, None)), threads=1)
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_a_worker_beyond_the_gpus_of_its_node_computes_on_the_cpu():
    found = environments(places(("a", False, ("G0",)), ("a", False, ("G0",))), threads=1)
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == ["G0", "-1"]


def test_workers_of_slow_nodes_are_outside_of_the_synchronous_group():
    found = environments(places(("a", True, ()), ("b", False, ()), ("c", False, ())), threads=1)
    configs = [json.loads(each["TF_CONFIG"]) for each in found]
    assert configs[0]["cluster"] == {"worker": ["b:1001", "c:1002"], "async": ["a:1000"]}
    assert [(each["task"]["type"], each["task"]["index"]) for each in configs] == [
        ("async", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert {each["KERAS_HET_SERVICE_ADDRESS"] for each in found} == {"b:1101"}
    assert len({each["KERAS_HET_SECRET"] for each in found}) == 1


def test_slow_nodes_alone_are_refused():
    with pytest.raises(ValueError, match="no worker is left for the synchronous group"):
        environments(places(("a", True, ())), threads=1)


@pytest.fixture
def losses(monkeypatch):
    far = group.Progress()
    monkeypatch.setattr(group.ray, "get", lambda result: result)
    actor = SimpleNamespace(furthest=SimpleNamespace(remote=far.furthest))
    return group.Losses(FailureConfig(), 2, actor), far


def decide(policy, *errors):
    return policy.make_decision(WorkerGroupError("lost", dict(enumerate(errors))))


RETRY, RAISE = FailureDecision.RETRY, FailureDecision.RAISE


def test_losses_count_without_progress_in_between(losses):
    policy, far = losses
    assert [decide(policy, LOST) for _ in range(2)] == [RETRY] * 2
    far.note_saved("a", 0, 5)
    assert [decide(policy, LOST) for _ in range(3)] == [RETRY, RETRY, RAISE]


def test_steps_that_were_saved_before_are_no_progress(losses):
    policy, far = losses
    for place in ((0, 3), (1, 2)):
        far.note_saved("a", *place)
    assert decide(policy, LOST) == RETRY
    for place in ((0, 9), (1, 2), (1, 1)):
        far.note_saved("a", *place)
    assert [decide(policy, LOST) for _ in range(2)] == [RETRY, RAISE]


def test_steps_of_the_next_fit_are_progress(losses):
    policy, far = losses
    far.note_saved("first", 9, 0)
    for step in range(9):
        far.note_saved("second", 0, step)
        assert [decide(policy, LOST) for _ in range(2)] == [RETRY, RETRY]


def test_machines_that_leave_in_order_do_not_count(losses):
    policy, _ = losses
    assert {decide(policy, LeavingError(), LeavingError()) for _ in range(9)} == {RETRY}
    assert [decide(policy, LOST, LeavingError()) for _ in range(3)] == [RETRY, RETRY, RAISE]


def test_a_loss_is_one_line_of_the_log(losses, caplog):
    decide(losses[0], LeavingError("left"), RuntimeError("the actor died\nWorker info:\n  ip=1"))
    assert caplog.messages == [
        "Another group of workers continues from the newest backup, after worker 0: LeavingError: "
        "left; worker 1: RuntimeError: the actor died"
    ]


def test_a_group_may_wait_for_machines_for_long(losses):
    policy, _ = losses
    waits = ControllerError(WorkerGroupStartupTimeoutError(num_workers=3))
    assert {policy.make_decision(waits) for _ in range(9)} == {RETRY}
    assert policy.make_decision(ControllerError(ValueError("of ours"))) == RAISE


def raised_by_a_worker(error):
    with pytest.raises(Exception) as found, group.OnWorker(None, "run"):  # type: ignore[arg-type]
        raise error
    return found.value


def test_a_taken_port_is_no_error_of_the_script(losses, monkeypatch):
    from keras_het.strategy.cluster.arrival import wait_for_peers

    policy, _ = losses
    monkeypatch.setattr(group.OnWorker, "__enter__", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr("keras_het.strategy.cluster.arrival._SECONDS_TO_END", 0.0)
        with pytest.raises(RuntimeError, match="cannot listen") as taken:
            wait_for_peers(address, {}, 1.0, listens=True)
    assert decide(policy, raised_by_a_worker(taken.value)) == RETRY
    assert decide(policy, raised_by_a_worker(RuntimeError("of the script"))) == RAISE


def test_an_error_of_the_script_ends_all_also_beside_losses(losses):
    policy, _ = losses
    assert decide(policy, LOST, TrainFunctionError("Traceback")) == RAISE


@pytest.mark.parametrize(("given", "most"), [(0, 3), (5, 5), (-1, math.inf)])
def test_the_limit_of_losses_is_that_of_ray_train(given, most):
    run_config = RunConfig(failure_config=FailureConfig(max_failures=given))
    trainer = KerasTrainer(lambda: None, 2, run_config=run_config)
    assert trainer._most_losses == most
    assert run_config.failure_config.max_failures == given


def test_a_node_that_does_not_listen_is_not_present():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        node = {
            "Alive": True,
            "NodeManagerAddress": "127.0.0.1",
            "NodeManagerPort": server.getsockname()[1],
        }
        assert trainer._answers(node)
        assert not trainer._answers({**node, "Alive": False})
    assert not trainer._answers(node)


def test_workers_are_counted_on_nodes_that_stay(monkeypatch):
    nodes = [{"NodeID": name} for name in ("present", "leaving", "silent")]
    monkeypatch.setattr(trainer.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(trainer.state, "get_draining_nodes", lambda: {"leaving": 0})
    monkeypatch.setattr(trainer, "_answers", lambda node: node["NodeID"] != "silent")
    config = ScalingConfig(num_workers=(1, 9), resources_per_worker={"het": 1})
    policy = trainer.PresentNodes(config)
    held = {each["NodeID"]: {"het": 2.0} for each in nodes}
    assert policy._count_possible_workers({**held, "gone": {"het": 2.0}}) == 2


def test_only_a_whole_group_is_asked_to_save():
    asked: list[Any] = []
    whole = SimpleNamespace(execute_async=lambda function: asked.append(function))
    leaves = SimpleNamespace(errors={}, get_preemption_info=lambda: object())
    stop = group.StopTogether(1.0)
    stop.after_worker_group_poll_status(leaves)  # no group yet
    stop.after_worker_group_training_start(whole)
    for _ in range(2):
        stop.after_worker_group_poll_status(leaves)
    assert asked == [group.stop] * 2
    stop.after_worker_group_poll_status(SimpleNamespace(**{**vars(leaves), "errors": {1: LOST}}))
    stop.after_worker_group_poll_status(leaves)
    stop.before_controller_execute_resize_decision(None)
    assert len(asked) == 2


def test_a_script_runs_from_a_copy_where_its_machine_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.sys, "argv", [])
    monkeypatch.setattr(trainer.sys, "path", [*trainer.sys.path])
    source = b"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(__name__)"
    missing, result = tmp_path / "missing.py", tmp_path / "result"
    trainer.run_script({"name": str(missing), "arguments": [str(result)], "source": source})
    assert result.read_text() == "__main__"


FAILED_TO_QUERY = "Failed to query Ray Train Controller actor state. State API may be unavailable."
BEGINS = [
    "Requesting resources: {'het': 1.0} * 3",
    "Detected ready resources for 3 workers in the cluster. Deciding to start/restart training",
    "Attempting to start training worker group of size 3 with the following resources: [] * 3",
    "Started training worker group of size 3: ",
    "- (ip=192.0.2.2, pid=6982) world_rank=0, local_rank=0, node_rank=0",
]
LOGGED = [
    "[2026-11-29 10:54:36,344 E 24459 24631] core_worker.cc:2465: Actor with class name: 'P'",
    "Traceback (most recent call last):",
    '  File "/venv/lib/python3.11/site-packages/ray/util/state/api.py", line 1, in get_actor',
    "    raise RayStateApiException(",
    "ray.util.state.exception.RayStateApiException: no dashboard",
]
WAITS = "Retrying to start: not enough resources."


def test_the_log_of_a_training_on_ray_has_a_line_for_each_event():
    shown: list[str] = []
    log = cluster.EachOnce(lambda batch: shown.extend(batch["lines"]))

    def say(actor, *lines, is_err=True, pid=7):
        log({"actor_name": actor, "pid": pid, "is_err": is_err, "lines": list(lines)})

    for _ in range(2):
        say("PlacementGroupCleaner", *[FAILED_TO_QUERY] * 50)
        say("TrainController", *LOGGED, *[WAITS] * 9, *BEGINS, *BEGINS[-1:])
        say("RayTrainWorker", "I0000 00:00:1.4 5 port.cc:153] oneDNN is on.", "a warning")
        say("RayTrainWorker", "Epoch 1/4", is_err=False)
    say(None, "1", "1", pid="raylet")
    say("Mine", "2", "2")
    a_group = [
        "ray.util.state.exception.RayStateApiException: no dashboard",
        WAITS,
        BEGINS[3],
        "a warning",
        "Epoch 1/4",
    ]
    # an error that a process repeats is one
    assert shown == [*a_group, *a_group, "1", "1", "2", "2"]


def test_frames_are_shown_of_the_first_worker_of_a_group_that_fails():
    shown: list[str] = []
    log = cluster.EachOnce(lambda batch: shown.extend(batch["lines"]))

    def say(actor, pid, *lines):
        log({"actor_name": actor, "pid": pid, "is_err": True, "lines": list(lines)})

    for number in range(2):
        say("TrainController", 1, BEGINS[3])
        for pid in (10 + number, 20 + number):
            say("RayTrainWorker", pid, *LOGGED[1:])
    assert shown == 2 * [BEGINS[3], *LOGGED[1:], LOGGED[-1]]


def test_the_log_is_shortened_once_and_silence_stays():
    dispatcher = cluster.ray_logging.global_worker_stdstream_dispatcher
    cluster.shorten_log()
    assert dispatcher.handlers == []
    shown: list[Any] = []
    dispatcher.add_handler("ray_print_logs", shown.append)
    try:
        for _ in range(2):
            cluster.shorten_log()
        ((_, handler),) = dispatcher.handlers
        assert handler._show == shown.append
        dispatcher.emit({"actor_name": "Mine", "pid": 1, "is_err": True, "lines": ["a"]})
        assert [batch["lines"] for batch in shown] == [["a"]]
    finally:
        dispatcher.remove_handler("ray_print_logs")
