import json
import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from keras_het.launch import LocalCluster
from keras_het.launch.local import free_ports
from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.launch.local.worker_environment import Emulation

TIMEOUT = 60.0
WAIT_FOR_EVER = """
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_results_have_exit_codes_and_output(cluster_of):
    cluster = cluster_of(
        r"""
        sys.stdout.write(f"10%\r20%\r\x1b[1mout {index}\x1b[0m\n")
        print("err", index, file=sys.stderr)
        print("last without end", end="")
        """,
        3,
    )
    results = cluster.wait(TIMEOUT)
    assert [result.index for result in results] == [0, 1, 2]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert [result.stdout for result in results] == [
        f"out {index}\nlast without end" for index in range(3)
    ]
    assert [result.stderr for result in results] == [f"err {index}" for index in range(3)]
    assert not cluster.failures


def test_workers_can_listen_on_their_own_address_and_reach_each_other(cluster_of):
    cluster = cluster_of(
        """
        import socket
        addresses = [address.split(":") for address in config["cluster"]["worker"]]
        own, other = addresses[index], addresses[1 - index]
        if index == 0:
            with socket.create_server((own[0], int(own[1]))) as server:
                print("listening", flush=True)
                server.settimeout(50)
                print(server.accept()[0].recv(10).decode())
        else:
            connected = False
            while not connected:
                try:
                    with socket.create_connection((other[0], int(other[1])), 50) as client:
                        client.sendall(b"hello")
                    connected = True
                except ConnectionRefusedError:
                    pass
        """,
        2,
    )
    assert all(address.startswith("127.0.0.1:") for address in cluster.addresses)
    assert len(set(cluster.addresses)) == 2
    assert cluster.wait(TIMEOUT)[0].stdout == "listening\nhello"


def test_environment_of_each_worker(cluster_of, tmp_path):
    cluster = cluster_of(
        """
        names = ["TF_CONFIG", "ALL", "OWN", "KERAS_HET_EMULATED_DEVICES"]
        print(json.dumps([os.environ.get(name) for name in names] + [os.getcwd()]))
        """,
        env={"ALL": "all"},
        worker_env=[{"OWN": "first"}, {"OWN": "second"}],
        emulation=Emulation((2.0, 1.0)),
        cwd=tmp_path,
    )
    printed = [json.loads(result.stdout) for result in cluster.wait(TIMEOUT)]
    assert [row[1:3] for row in printed] == [["all", "first"], ["all", "second"]]
    assert [json.loads(row[3])[0]["speed"] for row in printed] == [2.0, 1.0]
    assert {row[4] for row in printed} == {str(tmp_path)}
    tasks = [json.loads(row[0]) for row in printed]
    assert [task["task"]["index"] for task in tasks] == [0, 1]
    assert tasks[0]["cluster"] == tasks[1]["cluster"] == {"worker": list(cluster.addresses)}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_pinned_workers_run_on_their_cpus_and_we_on_ours(cluster_of):
    before = os.sched_getaffinity(0)
    cpus = sorted(before)
    cluster = cluster_of("print(sorted(os.sched_getaffinity(0)))", 3, pin=True, cpus_per_worker=1)
    assert [json.loads(result.stdout) for result in cluster.wait(TIMEOUT)] == [
        [cpus[index % len(cpus)]] for index in range(3)
    ]
    assert os.sched_getaffinity(0) == before


def test_threads_of_workers_respect_a_quota(cluster_of, monkeypatch):
    monkeypatch.setattr("keras_het.launch.local.local_cluster.own_cpus", lambda: range(9))
    monkeypatch.setattr("keras_het.launch.local.local_cluster.usable_cpus", lambda: 5.5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    cluster = cluster_of('print(os.environ["OMP_NUM_THREADS"])', 2, pin=False)
    assert [result.stdout for result in cluster.wait(TIMEOUT)] == ["2", "2"]


def test_an_async_worker_that_fails_ends_nobody(cluster_of):
    script = """
    print(os.environ["KERAS_HET_SERVICE_ADDRESS"], len(os.environ["KERAS_HET_SECRET"]))
    print(json.dumps(config))
    sys.exit(7 if config["task"]["type"] == "async" else 0)
    """
    cluster = cluster_of(script, 3, num_async_workers=1)
    results = cluster.wait(TIMEOUT)
    assert [result.exit_code for result in results] == [0, 0, 7]
    assert not any(result.was_ended for result in results)
    services, configs = zip(*(result.stdout.splitlines() for result in results), strict=True)
    assert len(set(services)) == 1 and services[0].endswith(" 64")
    jobs = {"worker": list(cluster.addresses[:2]), "async": list(cluster.addresses[2:])}
    for config, task in zip(configs, [("worker", 0), ("worker", 1), ("async", 0)], strict=True):
        own = dict(zip(("type", "index"), task, strict=True))
        assert json.loads(config) == {"cluster": jobs, "task": own}


@pytest.mark.parametrize(
    ("outside", "env", "names"),
    [
        ({}, {"KERAS_HET_SECRET_FILE": "file"}, ["KERAS_HET_SECRET_FILE"]),
        ({"KERAS_HET_SECRET": ""}, {}, ["KERAS_HET_SECRET"]),
        ({}, {"KERAS_HET_SECRET": "own"}, ["KERAS_HET_SECRET"]),
    ],
)
@pytest.mark.parametrize("by_worker", [False, True])
def test_workers_get_one_secret_that_is_the_users_if_there_is_one(
    cluster_of, monkeypatch, outside, env, names, by_worker
):
    for name in ("KERAS_HET_SECRET", "KERAS_HET_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    given: dict[str, object] = {"worker_env": [env, env]} if by_worker else {"env": env}
    cluster = cluster_of(
        """
        found = {name: value for name, value in os.environ.items() if "HET_SECRET" in name}
        print(json.dumps({name: value for name, value in found.items() if value}))
        """,
        2,
        num_async_workers=1,
        **given,
    )
    first, second = (json.loads(result.stdout) for result in cluster.wait(TIMEOUT))
    assert first == second
    assert list(first) == names
    assert not env or first == env


def test_a_worker_that_ignores_sigterm_is_killed(cluster_of):
    ignores = "if index == 1:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    cluster = cluster_of(ignores + WAIT_FOR_EVER, 3, grace_seconds=1.0)
    cluster.kill(0)
    results = cluster.wait(TIMEOUT)
    ended = [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGTERM]
    assert [result.exit_code for result in results] == ended
    assert [result.was_ended for result in results] == [False, True, True]
    assert cluster.failures == (results[0],)


def test_survivors_can_be_watched(cluster_of):
    cluster = cluster_of(
        """
        # Blocked, so that it waits for sigwait if it comes first.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print("ready", flush=True)
        signal.sigwait({signal.SIGUSR1})
        print("noticed")
        sys.exit(4)
        """,
        2,
        end_on_failure=False,
    )
    cluster.kill(1)
    with pytest.raises(TimeoutError, match=r"Workers \[0\] still run after 0\.3 s(.|\n)*ready"):
        cluster.wait(0.3)
    cluster.kill(0, signal.SIGUSR1)
    results = cluster.wait(TIMEOUT)
    assert [result.exit_code for result in results] == [4, -signal.SIGKILL]
    assert [failure.index for failure in cluster.failures] == [1, 0]
    assert results[0].stdout == "ready\nnoticed"


def test_stop_request_forwards_the_signal_and_then_stronger_ones(cluster_of):
    seen: list[int] = []
    cluster = cluster_of(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if index == 0:
            signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
        """,
        2,
        grace_seconds=0.1,
        on_stop=seen.append,
    )
    cluster.request_stop()
    results = cluster.wait(TIMEOUT)
    assert results[0].stdout == "ready\ninterrupted"
    assert [result.exit_code for result in results] == [-signal.SIGKILL, -signal.SIGINT]
    assert (cluster.stopped_by, seen, cluster.failures) == (signal.SIGINT, [signal.SIGINT], ())


def test_second_stop_request_does_not_wait(cluster_of):
    cluster = cluster_of(
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            signal.pause()
        """,
        1,
        grace_seconds=10_000.0,
    )
    for _ in range(3):
        cluster.request_stop()
    assert cluster.wait(TIMEOUT)[0].exit_code == -signal.SIGKILL


def test_close_leaves_no_process_behind(cluster_of, assert_gone):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    cluster = cluster_of(
        """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print("ready", child.pid, flush=True)
        signal.pause()
        """,
        2,
    )
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    process_ids = sorted(after - before)
    assert len(process_ids) == 5, "two workers, a child of each, and the watchdog"
    cluster.close()
    assert_gone(process_ids)
    assert not [t for t in threading.enumerate() if t.name.startswith("worker-")]
    cluster.close()


def test_a_finished_workers_children_end_with_it(cluster_of, assert_gone):
    cluster = cluster_of(
        """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(child.pid)
        """,
        1,
    )
    (result,) = cluster.wait(TIMEOUT)
    assert result.exit_code == 0
    assert_gone([int(result.stdout)])


def test_only_the_last_lines_are_kept_and_printed(cluster_of):
    cluster = cluster_of('print(*range(100), sep="\\n")', 1, keep_lines=2)
    with pytest.raises(TimeoutError, match=r"Worker 0 ended without printing 'x'(.|\n)*: 98\n"):
        cluster.wait_for_output(0, "x", TIMEOUT)
    assert cluster.wait(TIMEOUT)[0].stdout == "98\n99"
    with pytest.raises(ValueError, match="starts once"):
        cluster.start()


def test_wrong_use():
    with pytest.raises(ValueError, match=r"at least 1 worker\. Received: num_workers=0"):
        LocalCluster(["x"], 0)
    with pytest.raises(ValueError, match=r"one speed for each worker.*2 speeds .* and 3 workers"):
        LocalCluster(["x"], 3, emulation=Emulation((2.0, 1.0)))
    with pytest.raises(ValueError, match=r"one mapping for each worker.*1 mappings and 2 workers"):
        LocalCluster(["x"], 2, worker_env=[{}])
    with (
        pytest.raises(ValueError, match=r"cannot be started: .*/no/such/program"),
        LocalCluster(["/no/such/program"], 2),
    ):
        pass


def bind(port):
    with socket.socket() as own:
        own.bind(("127.0.0.1", port))


def test_ports_are_distinct_and_held_until_released():
    with ReservedPorts(20) as reserved:
        assert len(set(reserved.ports)) == 20
        assert reserved.addresses == tuple(f"127.0.0.1:{port}" for port in reserved.ports)
        with pytest.raises(OSError, match="in use"):
            bind(reserved.ports[0])
        reserved.release()
        for port in reserved.ports:
            bind(port)


def test_two_clusters_never_share_a_port_even_after_release(monkeypatch):
    with ReservedPorts(1) as first:
        first.release()
        taken = first.ports[0]
        with ReservedPorts(1) as spare:
            free = spare.ports[0]
        candidates = iter([taken, taken, free])
        monkeypatch.setattr(free_ports, "_candidate", lambda: next(candidates))
        with ReservedPorts(1) as second:
            assert second.ports == (free,)


def test_gives_everything_back_when_there_are_not_enough(monkeypatch):
    with ReservedPorts(1) as spare:
        only = spare.ports[0]
    monkeypatch.setattr(free_ports, "_candidate", lambda: only)
    with pytest.raises(OSError, match="No free port found"):
        ReservedPorts(2)
    bind(only)


def test_ports_are_outside_the_range_of_outgoing_connections():
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        pytest.skip("this system does not say which ports it deals out")
    if lowest <= 20_000:
        pytest.skip("this system leaves too few ports below that range")
    with ReservedPorts(10) as reserved:
        assert all(10_000 <= port < lowest for port in reserved.ports)
