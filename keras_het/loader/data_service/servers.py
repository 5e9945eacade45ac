"""TensorFlow's servers of the tf.data service."""

from __future__ import annotations

import socket
from typing import Any, TypeAlias

import tensorflow as tf

from keras_het.loader.data_service.addresses import (
    check_host,
    is_loopback,
    is_reachable,
    split_address,
)

Server: TypeAlias = (
    "tf.data.experimental.service.DispatchServer | tf.data.experimental.service.WorkerServer"
)
_WORKER_TIMEOUT_MS = 10_000
_HEARTBEAT_MS = 1_000
_LOOK_SECONDS = 2.0


def start_dispatcher(port: int, work_dir: str | None = None) -> tuple[Server, int]:
    """Start a dispatcher in this process.

    Args:
        port: its port, 0 for a free one.
        work_dir: folder of its journal, from which it continues if the folder existed before.

    Returns:
        The server and its port.

    Raises:
        OSError: if the port is taken.
    """
    _check_free(port, "dispatcher", ", or join a dispatcher that runs there by its address")
    config = tf.data.experimental.service.DispatcherConfig(
        port=port,
        work_dir=work_dir,
        fault_tolerant_mode=work_dir is not None,
        worker_timeout_ms=_WORKER_TIMEOUT_MS,
    )
    try:
        server = tf.data.experimental.service.DispatchServer(config)
    except tf.errors.OpError as error:
        raise OSError(
            f"The dispatcher of the tf.data service cannot start on port {port}: {error.message}. "
            "Give a free port, or 0."
        ) from error
    return server, int(server.target.rpartition(":")[2])


def start_worker(
    dispatcher: str, host: str, port: int = 0, dispatcher_timeout: float | None = None
) -> Server:
    """Start a worker in this process.

    Args:
        dispatcher: "host:port" of the dispatcher, which must run.
        host: name or address under which consumers reach this machine.
        port: its port, 0 for a free one.
        dispatcher_timeout: how long to try to reach the dispatcher, in seconds; default an hour.

    Returns:
        The server.

    Raises:
        OSError: if the port is taken.
        ValueError: if `host` stands for all interfaces, or for this machine's loopback while the
            dispatcher is on another one.
    """
    check_host(host)
    _check_free(port, "worker")
    _check_host(dispatcher, host)
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=f"{host}:%port%",
        data_transfer_address=f"{host}:%dts_port%",
        port=port,
        heartbeat_interval_ms=_HEARTBEAT_MS,
        dispatcher_timeout_ms=None if dispatcher_timeout is None else int(dispatcher_timeout * 1e3),
    )
    try:
        return tf.data.experimental.service.WorkerServer(config)
    except tf.errors.OpError as error:
        raise OSError(
            f"A worker of the tf.data service cannot start on port {port} for the dispatcher "
            f"{dispatcher}: {error.message}. Give a free port, or 0."
        ) from error


def _check_free(port: int, what: str, otherwise: str = "") -> None:
    # TensorFlow would silently share a port with another of its servers
    if port != 0 and is_reachable(f"127.0.0.1:{port}", _LOOK_SECONDS):
        raise OSError(
            f"The {what} of the tf.data service cannot listen on port {port}: another server "
            f"does. Give a free port, or 0{otherwise}."
        )


def _check_host(dispatcher: str, host: str) -> None:
    """Refuse hosts with which consumers elsewhere would wait forever for a worker of their own."""
    if is_loopback(host) and not _is_here(dispatcher):
        raise ValueError(
            f"The dispatcher {dispatcher} is on another machine, whose consumers cannot reach a "
            f"worker here under host={host!r}. Give the name or address under which they reach "
            "this machine (--host)."
        )


def _is_here(address: str) -> bool:
    """Tell whether an address belongs to this machine, if it answers."""
    try:
        with socket.create_connection(split_address(address), _LOOK_SECONDS) as connection:
            family, peer = connection.family, connection.getpeername()
    except OSError:
        return True  # TensorFlow waits for it
    return _can_bind(family, peer)


def _can_bind(family: int, peer: tuple[Any, ...]) -> bool:
    # the two ends of a connection within a machine may differ: 127.0.1.1, which Debian assigns to
    # the machine's name, is reached from 127.0.0.1
    host, _, *others = peer
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0, *others))
        except OSError:
            return False
    return True
