"""Push and pull of all weights: the parameter service against its peers.

    python benchmarks/parameter_service.py [--json FILE] [--quick] [--size MB]

Clients are separate processes that exchange as fast as they can: each sends a change of every
weight and gets the center back. Peers in the same run, in turn with ours: (a) `remote_variables`,
the same bytes through variables on a standard `tf.distribute.Server`; (b) `socket`, a raw loopback
connection that sends and returns the same bytes, the physical limit here; (c) `echo`, the same
messages to a service that only returns them: the cost of the messages alone.
`gb_per_s` counts both directions of all clients. `memory_ratio`: the largest resident memory of the
service's process, minus its memory with TensorFlow loaded and before it made the variables, over
the variables' bytes; it thus includes all costs of serving: variables, messages and what the
allocator keeps. `server_memory_mb` is the peak of that whole process, `client_memory_mb` the
largest client's. If the processes of all kinds do not fit into memory at the same time
(`alive_together` false), each kind's are started for its turn only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import psutil
from _report import environment, print_table, write_report

from keras_het.launch.local.free_ports import ReservedPorts

KINDS = ("service", "remote_variables", "socket", "echo")
SECRET = b"of this benchmark only"
PROCESS_MB, COPIES = 300, 3.5
"""Approximate memory of a process itself, and number of copies of the weights."""
ROUNDS_ALONE = 3


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="little data: form, not numbers")
    parser.add_argument("--size", type=int, help="only this one of 4, 40 and 400 MB")
    parser.add_argument("--debug", action="store_true", help="show what the processes print")
    options = parser.parse_args()
    sizes, clients = ((4,), (2,)) if options.quick else ((4, 40, 400), (1, 2, 4))
    rows: list[dict[str, Any]] = []
    for size in [options.size] if options.size else sizes:
        for count in clients:
            rows += measure(size, count, options.quick)
            # written each time: large sizes take minutes
            write_report("parameter_service", rows, options.json, environment())
    print_table(rows)


def measure(size_mb: int, num_clients: int, quick: bool) -> list[dict[str, Any]]:
    """Return one row: all kinds are alive and take turns, or each starts for its turn."""
    rounds, exchanges = (2, 3) if quick else (7, max(2, 400 // size_mb // num_clients))
    together = _fit_together(size_mb, num_clients)
    rounds = rounds if together else min(rounds, ROUNDS_ALONE)
    take_turns = _take_turns if together else _take_turns_alone
    times, (memory, client_memory, before) = take_turns(size_mb, num_clients, rounds, exchanges)
    rates = [[2e-3 * size_mb * num_clients / seconds for seconds in turn] for turn in times]
    ours, variables, raw, echo = (list(rate) for rate in zip(*rates, strict=True))
    to_variables = sorted(a / b for a, b in zip(ours, variables, strict=True))
    to_socket = sorted(a / b for a, b in zip(ours, raw, strict=True))
    to_echo = sorted(a / b for a, b in zip(ours, echo, strict=True))
    return [
        {
            "case": f"{size_mb} MB, {num_clients} client(s)",
            "size_mb": size_mb,
            "clients": num_clients,
            "gb_per_s": round(statistics.median(ours), 3),
            "ratio_to_remote_variables": round(statistics.median(to_variables), 3),
            "lowest_ratio": round(to_variables[0], 3),
            "highest_ratio": round(to_variables[-1], 3),
            "ratio_to_socket": round(statistics.median(to_socket), 3),
            "ratio_to_echo": round(statistics.median(to_echo), 3),
            "remote_variables_gb_per_s": round(statistics.median(variables), 3),
            "socket_gb_per_s": round(statistics.median(raw), 3),
            "echo_gb_per_s": round(statistics.median(echo), 3),
            "server_memory_mb": round(memory),
            "client_memory_mb": round(client_memory),
            "memory_ratio": round((memory - before) / size_mb, 2),
            "num_runs": rounds,
            "alive_together": together,
        }
    ]


def _fit_together(size_mb: int, num_clients: int) -> bool:
    """Tell whether the processes of all kinds fit into memory at the same time."""
    needed = len(KINDS) * (num_clients + 1) * (PROCESS_MB + COPIES * size_mb)
    return bool(needed < psutil.virtual_memory().available / 1e6)


def _take_turns(
    size_mb: int, num_clients: int, rounds: int, exchanges: int
) -> tuple[list[list[float]], tuple[float, float, float]]:
    """Return each kind's seconds per exchange in each round; memory of the service, see `Group`."""
    with contextlib.ExitStack() as closing:
        groups = []
        for kind in KINDS:
            groups.append(Group())
            closing.callback(groups[-1].close)
            groups[-1].start(kind, size_mb, num_clients)
            groups[-1].run(exchanges)  # warms up
        times = [[group.run(exchanges) for group in groups] for _ in range(rounds)]
        return times, groups[0].memory_mb()


def _take_turns_alone(
    size_mb: int, num_clients: int, rounds: int, exchanges: int
) -> tuple[list[list[float]], tuple[float, float, float]]:
    """Do the same as `_take_turns`, but each kind has the machine to itself in its turn."""
    times: list[list[float]] = []
    memory = []
    for _ in range(rounds):
        times.append([])
        for kind in KINDS:
            with contextlib.closing(Group()) as group:
                group.start(kind, size_mb, num_clients)
                group.run(exchanges)  # warms up
                times[-1].append(group.run(exchanges))
                if kind == "service":
                    memory.append(group.memory_mb())
    return times, max(memory)


class Group:
    """One kind of server and its clients."""

    def __init__(self) -> None:
        self._before_mb = 0.0
        self._clients: list[subprocess.Popen[str]] = []
        self._closing = contextlib.ExitStack()

    def start(self, kind: str, size_mb: int, num_clients: int) -> None:
        """Return when all processes are ready."""
        ports = ReservedPorts(1 + num_clients)
        self._closing.callback(ports.close)
        ports.release()
        addresses = list(ports.addresses)
        self._server = self._process(f"{kind}-server", size_mb, *addresses)
        # The service reports its process's memory before it made the variables.
        self._before_mb = float(_read(self._server).partition(" ")[2] or 0)
        for index in range(num_clients):
            client = self._process(f"{kind}-client", size_mb, index, *addresses)
            self._clients.append(client)
        for client in self._clients:
            _read(client)

    def _process(self, role: str, *arguments: Any) -> subprocess.Popen[str]:
        process = _start(role, *arguments)
        self._closing.callback(process.wait)
        self._closing.callback(process.kill)
        return process

    def run(self, exchanges: int) -> float:
        """Return the seconds for one exchange of every client, all at the same time."""
        for client in self._clients:
            client.stdin.write(f"{exchanges}\n")
            client.stdin.flush()
        return max(float(_read(client)) for client in self._clients) / exchanges

    def memory_mb(self) -> tuple[float, float, float]:
        """Return the peak of the server and of the largest client; the server's without weights."""
        clients = [_memory_mb(client.pid, "VmHWM") for client in self._clients]
        return _memory_mb(self._server.pid, "VmHWM"), max(clients), self._before_mb

    def close(self) -> None:
        """End all processes."""
        self._closing.close()


def _memory_mb(pid: int | str, name: str) -> float:
    """Return a process's resident memory on Linux: VmRSS is the current one, VmHWM the peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def _start(role: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, role, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if "--debug" in sys.argv else subprocess.DEVNULL,
        text=True,
    )


def _read(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with exit code {process.wait()}.")
    return line.strip()


def _serve_blocks(run: Any) -> None:
    """Run the client's side of `Group.run`."""
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            run()
        print(time.perf_counter() - start, flush=True)


def _elements(size_mb: str) -> int:
    return int(size_mb) * 250_000


def service_server(size_mb: str, address: str, *_: str) -> None:
    from keras_het.launch.serve_command import share_freed_memory

    share_freed_memory()  # as `keras-het parameter-server` does

    import numpy as np
    import tensorflow as tf

    from keras_het.asynchronous.parameter_service import ParameterService, Partitions
    from keras_het.asynchronous.parameter_service.client import SERVICE
    from keras_het.exchange.server import Server
    from keras_het.rules import Delta

    tf.config.list_logical_devices()  # its own memory is not the service's
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present
    before = _memory_mb("self", "VmRSS")
    service = ParameterService(4)
    service.hold(Partitions(((_elements(size_mb),),)), Delta())
    for part in service.parts.values():
        part.set_center(np.zeros(part.size, np.float32))
    server = Server(address)
    server.serve(SERVICE, SECRET, service.handle)
    server.start()
    print(f"ready {before}", flush=True)
    threading.Event().wait()


def service_client(size_mb: str, index: str, address: str, *_: str) -> None:
    import numpy as np

    from keras_het.asynchronous.parameter_service import ParameterClient, Partitions
    from keras_het.asynchronous.parameter_service.client import RemoteChannel

    partitions = Partitions(((_elements(size_mb),),))
    client = ParameterClient([RemoteChannel(address, SECRET, int(index), 60.0)], partitions)
    change = [np.ones(size, np.float32) for size in partitions.sizes]
    versions = [np.zeros(len(change), np.int64)]

    def run() -> None:
        answer = client.start_push(change, versions[0], 1).answer()
        versions[0] = answer.versions
        if answer.statuses.any() or any(values is None for values in answer.values):
            raise RuntimeError(f"statuses {answer.statuses}")

    run()
    _serve_blocks(run)


def remote_variables_server(size_mb: str, *addresses: str) -> None:
    import tensorflow as tf

    server, *clients = addresses
    cluster = tf.train.ClusterSpec({"ps": [server], "worker": clients})
    standing = tf.distribute.Server(cluster, job_name="ps", task_index=0, protocol="grpc")
    print("ready", flush=True)
    threading.Event().wait()
    del standing


def remote_variables_client(size_mb: str, index: str, server: str, *clients: str) -> None:
    import tensorflow as tf

    job = f"client{index}"
    view = tf.train.ClusterSpec({"ps": [server], job: [clients[int(index)]]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        view, task_type=job, task_id=0, rpc_layer="grpc"
    )
    tf.config.experimental_connect_to_cluster(
        resolver, job_name=job, task_index=0, protocol="grpc", make_master_device_default=False
    )
    place = "/job:ps/replica:0/task:0/device:CPU:0"
    size = _elements(size_mb)
    with tf.device(place):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[size], shared_name="weights", container="benchmark"
        )
        if not tf.raw_ops.VarIsInitializedOp(resource=handle).numpy():
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([size]))
    change = tf.ones([size])

    @tf.function
    def exchange(handle: Any, change: Any) -> Any:
        with tf.device(place):
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=change)
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        return tf.identity(value)

    def run() -> None:
        float(exchange(handle, change)[0])

    run()
    _serve_blocks(run)


def echo_server(size_mb: str, address: str, *_: str) -> None:
    from keras_het.exchange.message import Kind, Message
    from keras_het.exchange.server import Server

    server = Server(address)
    server.serve("echo", SECRET, lambda sender, request: Message(Kind.SUM, (), request.vectors))
    server.start()
    print("ready", flush=True)
    threading.Event().wait()


def echo_client(size_mb: str, index: str, address: str, *_: str) -> None:
    import numpy as np

    from keras_het.asynchronous.parameter_service import Partitions
    from keras_het.asynchronous.parameter_service.client import UNDER_WAY
    from keras_het.exchange.client import Client
    from keras_het.exchange.message import Kind, Message

    client = Client(address, "echo", SECRET, int(index))
    client.connect(60.0)
    sizes = Partitions(((_elements(size_mb),),)).sizes
    change = [np.ones(size, np.float32) for size in sizes]

    def run() -> None:
        calls: list[Any] = []
        for values in change:
            if len(calls) >= UNDER_WAY:
                calls[-UNDER_WAY].result(60.0)
            calls.append(client.send(Message(Kind.SUM, (), (values,))))
        if sum(len(call.result(60.0).vectors[0]) for call in calls) != sum(sizes):
            raise RuntimeError("not all came back")

    run()
    _serve_blocks(run)


def socket_server(size_mb: str, address: str, *_: str) -> None:
    host, port = address.rsplit(":", 1)
    size = 4 * _elements(size_mb)

    def echo(connection: socket.socket) -> None:
        # sends while it receives, as an exchange in partitions does
        buffer = bytearray(4_096_000)
        view = memoryview(buffer)
        while True:
            left = size
            while left:
                got = connection.recv_into(view[: min(left, len(buffer))])
                if not got:
                    return
                connection.sendall(view[:got])
                left -= got

    with socket.create_server((host, int(port))) as listening:
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()


def socket_client(size_mb: str, index: str, address: str, *_: str) -> None:
    host, port = address.rsplit(":", 1)
    size = 4 * _elements(size_mb)
    data = bytes(size)
    received = memoryview(bytearray(size))
    connection = socket.create_connection((host, int(port)))

    def run() -> None:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        have = 0
        while have < size:
            have += connection.recv_into(received[have:])
        sender.join()

    run()
    _serve_blocks(run)


ROLES = {
    "service-server": service_server,
    "service-client": service_client,
    "remote_variables-server": remote_variables_server,
    "remote_variables-client": remote_variables_client,
    "echo-server": echo_server,
    "echo-client": echo_client,
    "socket-server": socket_server,
    "socket-client": socket_client,
}


if __name__ == "__main__":
    main()
