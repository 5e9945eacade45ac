"""`keras-het run --gpus` starts this machine's workers of a TF_CONFIG of several machines."""

from __future__ import annotations

import json
import sys

import pytest
from fake_nvml import FakeNvml, Gpu

from keras_het.launch.cluster_environment import own_workers
from keras_het.launch.command_line import main
from keras_het.launch.local.free_ports import ReservedPorts

WORKERS = ["a:1", "a:2", "b:1", "b:2", "b:3", "c:1"]


def tf_config(index, job="worker", **jobs):
    task = {"type": job, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": jobs or {"worker": WORKERS}, "task": task})}


def indices(own):
    assert own is not None
    return [json.loads(each)["task"]["index"] for each in own.tf_configs]


@pytest.mark.parametrize(("index", "gpus"), [(0, 2), (2, 3), (5, 1)])
def test_the_entries_of_this_machine_are_its_workers(index, gpus):
    own = own_workers(tf_config(index), gpus)
    assert indices(own) == list(range(index, index + gpus))
    assert own and own.first_index == index and not own.is_async


def test_the_users_json_is_kept():
    given = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "b:2"]},
        "task": {"type": "worker", "index": "0", "trial": "7"},
        "rpc_layer": "grpc",
        "environment": "cloud",
    }
    own = own_workers({"TF_CONFIG": json.dumps(given)}, 2)
    assert own is not None and own.first_index == 1  # behind the chief
    for index, text in enumerate(own.tf_configs):
        expected = {**given, "task": {"type": "worker", "index": index, "trial": "7"}}
        assert json.loads(text) == expected


def test_machines_of_async_workers_have_their_own_entries():
    own = own_workers(
        tf_config(1, "async", **{"worker": ["a:1", "a:2"], "async": ["b:1", "c:1"]}), 1
    )
    assert indices(own) == [1] and own and own.first_index == 3 and own.is_async


@pytest.mark.parametrize(
    "environ",
    [{}, {"TF_CONFIG": "{}"}, tf_config(0, worker=["127.0.0.1:1", "127.0.0.1:2"])],
    ids=["none", "empty", "one machine"],
)
def test_other_configurations_are_not_of_several_machines(environ):
    assert own_workers(environ, 2) is None


BROKEN: dict[str, tuple[dict[str, str], int, str]] = {
    "too few": (tf_config(0), 3, r"3 GPU\(s\), task worker 0 on a, .*indices \[0, 1\] on a"),
    "too many": (tf_config(2), 2, r"worker 4 \(b:3\) would never start\. Received: 2 GPU"),
    "not the first": (tf_config(3), 2, r"worker 2 \(b:1\) would never start"),
    "apart": (tf_config(0, worker=["a:1", "b:1", "a:2"]), 2, r"\[0, 2\] on a; expected: \[0, 1\]"),
    "chief": (
        tf_config(0, "chief", chief=["a:1"], worker=["b:1"]),
        1,
        "Received: TF_CONFIG with task type 'chief'",
    ),
    "index": (tf_config(6), 1, "task index is out of range"),
    "no JSON": ({"TF_CONFIG": "{"}, 1, "TF_CONFIG is not valid JSON"),
}


@pytest.mark.parametrize(("environ", "gpus", "message"), BROKEN.values(), ids=BROKEN)
def test_other_numbers_of_entries_are_refused(environ, gpus, message):
    with pytest.raises(ValueError, match=message):
        own_workers(environ, gpus)


def test_async_workers_are_listed_by_tf_config():
    with pytest.raises(ValueError, match="Received: --async-workers 1 too"):
        own_workers(tf_config(0), 2, 1)


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs and a TF_CONFIG."""

    def make(environ):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(uuid="GPU-a"), Gpu(uuid="GPU-b")))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return make


def test_workers_have_their_numbers_in_the_whole_cluster(machine, script, tmp_path, capfd):
    machine(tf_config(1, worker=["a:1", "b:1", "b:2", "c:1"]))
    path = script(
        """
        print("sees", os.environ["CUDA_VISIBLE_DEVICES"], config["cluster"]["worker"][index])
        # worker 1 is ended when this one fails: not before it has said the same
        while index == 2 and not os.path.getsize(sys.argv[1]):
            pass
        sys.exit(3 * (index == 2))
        """
    )
    logs = tmp_path / "logs"
    options = ["--gpus", "auto", "--log-dir", str(logs)]
    assert main(["run", *options, path, str(logs / "worker-1.log")]) == 3
    captured = capfd.readouterr()
    for line in ("sees GPU-a b:1", "sees GPU-b b:2"):
        index = int(line[-1])
        assert f"[worker {index}] {line}" in captured.out
        assert (logs / f"worker-{index}.log").read_text() == f"{line}\n"
    assert "worker 2 failed first: exit code 3" in captured.err
    assert "replaced" not in captured.err


def test_a_failure_among_async_workers_does_not_end_the_others(machine, script, capfd):
    machine(tf_config(0, "async", **{"worker": ["a:1"], "async": ["b:1", "b:2"]}))
    path = script(
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if index == 0:
            sys.exit(3)
        print("received", signal.sigtimedwait([signal.SIGTERM], 0.5))
        """
    )
    assert main(["run", "--gpus", "2", path]) == 3
    captured = capfd.readouterr()
    assert "[worker 2] received None" in captured.out
    assert "worker 1 failed first: exit code 3" in captured.err


def test_a_wrong_number_is_wrong_usage(machine, script, capsys):
    machine(tf_config(2))
    assert main(["run", "--gpus", "auto", script("")]) == 2
    assert "[keras-het] error: --gpus: TF_CONFIG must list one worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "config"),
    [(["--workers", "2"], tf_config(0)), (["--gpus", "2"], tf_config(0, worker=["a:1"]))],
)
def test_a_tf_config_that_is_replaced_is_reported_once(machine, script, capfd, arguments, config):
    machine(config)
    assert main(["run", *arguments, script('print(config["cluster"]["worker"][0][:9])')]) == 0
    captured = capfd.readouterr()
    assert captured.out.count("127.0.0.1") == 2
    assert captured.err.count("TF_CONFIG of the environment is replaced") == 1


@pytest.mark.full
def test_two_launchers_train_one_model(launch, train_script):
    with ReservedPorts(3) as reserved:
        reserved.release()
        addresses = [f"localhost:{reserved.ports[0]}"]
        addresses += [f"127.0.0.1:{port}" for port in reserved.ports[1:]]
        launchers = [
            launch(
                "run",
                *("--gpus", "auto", train_script),
                CUDA_VISIBLE_DEVICES=visible,
                **tf_config(index, worker=addresses),
            )
            for index, visible in [(0, "7"), (1, "8,9")]
        ]
        results = [launcher.finish(240.0) for launcher in launchers]
    assert [result.exit_code for result in results] == [0, 0], [each.stderr for each in results]
    lines = [line for each in results for line in each.stdout.splitlines() if "trained" in line]
    told = sorted(line.partition("[[")[0].partition("trained ")[::2] for line in lines)
    assert [(who, text.split()[:2]) for who, text in told] == [
        (f"[worker {index}] ", ["3", str(7 + index)]) for index in range(3)
    ]
    assert len({line.rpartition("[")[2] for line in lines}) == 1
