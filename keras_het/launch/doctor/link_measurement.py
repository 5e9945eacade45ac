"""How doctors of one cluster find, describe and time each other."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import threading
import time
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from keras_het.exchange.client import Client
from keras_het.exchange.links import measure_link, send_probe, take_probe
from keras_het.exchange.message import Kind, Message
from keras_het.exchange.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, read_secret
from keras_het.exchange.server import Server
from keras_het.launch.doctor.addresses import LISTENS, reach

_SERVICE = "doctor"
_CALL_SECONDS = 10.0
_DESCRIPTION_SECONDS = 2.0
_CONNECTIONS = 5
_POLL_SECONDS = 0.1
_NO_ANSWER = (ConnectionError, TimeoutError, NotImplementedError)


class Desk:
    """This node's server: describes the node, takes messages, and knows who has finished."""

    def __init__(self, address: str, key: bytes, node: Mapping[str, Any]) -> None:
        self._node = json.dumps(dict(node)).encode()
        self._finished: set[int] = set()
        self._changed = threading.Condition()
        self._server = Server(address)
        self._server.serve(_SERVICE, key, self._answer)
        self._server.start()

    def _answer(self, sender: int, request: Message) -> Message:
        if request.kind is Kind.DESCRIBE:
            text = np.frombuffer(self._node, np.uint8)
            return Message(Kind.DESCRIPTION, (int(1e6 * time.time()),), (text,))
        if request.kind is Kind.FINISH:
            with self._changed:
                self._finished.add(sender)
                self._changed.notify_all()
            return Message(Kind.DONE)
        return take_probe(sender, request)

    def serve_until(self, answered: Set[int], deadline: float, to_the_end: bool) -> None:
        """Serve those that still measure, then end."""
        # one that began late has at least the time of a call
        end = max(deadline, time.monotonic() + _CALL_SECONDS)
        with self._changed:
            self._changed.wait_for(
                lambda: answered <= self._finished and not to_the_end, end - time.monotonic()
            )
        self._server.close()


def measure(address: str, key: bytes, own_index: int) -> dict[str, Any]:
    reached, seconds = reach(address, 1.0)
    if reached != LISTENS:
        return {"reached": reached}
    connected = {"reached": LISTENS, "latency_seconds": seconds}
    client = Client(address, _SERVICE, key, own_index)
    try:
        said = client.ask(Message(Kind.DESCRIBE), _DESCRIPTION_SECONDS)
        ahead = said.numbers[0] / 1e6 - time.time()
        link = measure_link(functools.partial(send_probe, client))
        client.ask(Message(Kind.FINISH), _CALL_SECONDS)
    except PermissionError:
        return {**connected, "refused": True}
    except _NO_ANSWER:
        return connected
    finally:
        client.close()
    connections = [reach(address)[1] for _ in range(_CONNECTIONS)]
    return {
        "reached": LISTENS,
        "answers": True,
        "latency_seconds": min(filter(None, [*connections, seconds])),
        "call_seconds": 2 * link.latency_seconds,
        "bytes_per_second": link.bytes_per_second,
        "clock_ahead_seconds": ahead,
        "node": json.loads(said.vectors[0].tobytes()),
    }


def credential_of(cluster: Mapping[str, Any], environ: Mapping[str, str]) -> bytes:
    """Return what doctors of one cluster share: its TF_CONFIG, and the secret if there is one."""
    text = json.dumps(cluster, sort_keys=True)
    try:
        secret = read_secret(environ)
    except (ValueError, OSError):  # the check of secrets says so
        secret = f"{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}".encode()
    return hmac.digest(secret, f"keras-het doctor {text}".encode(), "sha256")


def measure_together(
    tasks: Mapping[str, str], own: str, node: Mapping[str, Any], key: bytes, wait_seconds: float
) -> dict[str, dict[str, Any]]:
    """Measure the links to the other tasks while they measure theirs; return them by task."""
    deadline = time.monotonic() + wait_seconds
    names = list(tasks)
    place = names.index(own) if own in tasks else -1
    desk = None
    if own in tasks:
        with contextlib.suppress(OSError):  # a check of its own says why
            desk = Desk(tasks[own], key, node)
    # as in a ring: where all begin at once, each node then sends to one and hears from one
    others = [*names[place + 1 :], *names[: max(place, 0)]]
    found = _measure_all({name: tasks[name] for name in others}, key, place, deadline)
    if desk is not None:
        answered = {names.index(name) for name in others if found[name].get("answers")}
        # one that refuses this node is refused by it, too, and cannot tell when it has seen that
        is_refused = any(link.get("refused") for link in found.values())
        desk.serve_until(answered, deadline, is_refused)
    return found


def _measure_all(
    others: Mapping[str, str], key: bytes, own_index: int, deadline: float
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    waiting = list(others)
    while waiting:
        for name in waiting:
            found[name] = measure(others[name], key, own_index)
        waiting = [
            name
            for name in waiting
            if not (found[name].get("answers") or found[name].get("refused"))
        ]
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return found
