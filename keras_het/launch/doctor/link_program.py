"""The program that measures links for `measure_links`, over TensorFlow's RPC."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_het.launch.doctor.addresses import LISTENS, reach
from keras_het.launch.doctor.tensorflow_facts import say
from keras_het.rpc.admission import Gate, Status, credential
from keras_het.rpc.channel import FunctionClient, NoAnswerError
from keras_het.rpc.links import measure_link, send_message, serve_messages
from keras_het.rpc.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, read_secret
from keras_het.rpc.server import FunctionServer, ServerStartError

_STATUS = tf.TensorSpec([], tf.int32)
_DESCRIPTION = (_STATUS, tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.float64))
_CALL_SECONDS = 10.0
_CONNECTIONS = 5
_POLL_SECONDS = 0.1


class Desk:
    """This node's server: describes the node, takes messages, and counts finished nodes."""

    def __init__(self, address: str, key: bytes, node: Mapping[str, Any], num_tasks: int) -> None:
        text = json.dumps(dict(node))
        self._finished = tf.Variable(tf.zeros([num_tasks], tf.int32), trainable=False)

        @tf.function(input_signature=[], autograph=False)
        def describe() -> Any:
            return tf.constant(int(Status.OK)), tf.constant(text), tf.timestamp()

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
        def finish(index: Any) -> Any:
            is_it = tf.cast(tf.equal(tf.range(num_tasks), index), tf.int32)
            self._finished.assign(tf.maximum(self._finished, is_it))
            return tf.constant(int(Status.OK))

        self._server = FunctionServer(address)
        self._server.register("describe", describe, Gate(key))
        self._server.register("finish", finish, Gate(key))
        serve_messages(self._server, Gate(key))
        self._server.start()

    def serve_until(self, answered: Sequence[int], deadline: float, to_the_end: bool) -> None:
        """Go on serving those that still measure."""
        # one that began late has at least the time of a call
        end = max(deadline, time.monotonic() + _CALL_SECONDS)
        while time.monotonic() < end:
            finished = self._finished.numpy()
            if all(finished[place] for place in answered) and not to_the_end:
                break
            time.sleep(_POLL_SECONDS)


def measure(address: str, key: bytes, own_index: int) -> dict[str, Any]:
    # a client of TensorFlow's that has found nobody waits ever longer before it tries again
    reached, seconds = reach(address, 1.0)
    if reached != LISTENS:
        return {"reached": reached}
    connected = {"reached": LISTENS, "latency_seconds": seconds}
    client = FunctionClient(address, key, _CALL_SECONDS)
    try:
        status, text, theirs = client.ask("describe", [], _DESCRIPTION, 2.0)
    except NoAnswerError:
        return connected
    if int(status) != Status.OK:
        return {**connected, "refused": True}
    ahead = float(theirs) - time.time()
    try:
        link = measure_link(functools.partial(send_message, client))
        client.ask("finish", [tf.constant(own_index)], _STATUS)
    except NoAnswerError:
        return connected
    connections = [reach(address)[1] for _ in range(_CONNECTIONS)]
    return {
        "reached": LISTENS,
        "answers": True,
        "latency_seconds": min(filter(None, [*connections, seconds])),
        "call_seconds": 2 * link.latency_seconds,
        "bytes_per_second": link.bytes_per_second,
        "clock_ahead_seconds": ahead,
        "node": json.loads(text.numpy()),
    }


def credential_of(cluster: Mapping[str, Any]) -> bytes:
    """Return what doctors of one cluster share: its TF_CONFIG, and the secret if there is one."""
    text = json.dumps(cluster, sort_keys=True)
    try:
        secret = read_secret()
    except (ValueError, OSError):  # the check of secrets says so
        secret = f"{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}".encode()
    return credential(secret, f"keras-het doctor {text}")


def main() -> None:
    """Read a request of `measure_links`, and print the measurements by task."""
    request = json.load(sys.stdin)
    tasks, own = request["tasks"], request["own"]
    key = credential_of(request["cluster"])
    deadline = time.monotonic() + float(request["wait_seconds"])
    names = list(tasks)
    place = names.index(own) if own in tasks else -1
    desk = None
    if own in tasks:
        try:
            desk = Desk(tasks[own], key, request["node"], len(names))
        except ServerStartError as error:  # a check of its own says why
            sys.stderr.write(f"{error}\n")
    # as in a ring: where all begin at once, each node then sends to one and hears from one
    others = [*names[place + 1 :], *names[: max(place, 0)]]
    found = measure_all({name: tasks[name] for name in others}, key, place, deadline)
    if desk is not None:
        answered = [names.index(name) for name in others if found[name].get("answers")]
        # one that refuses this node is refused by it, too, and cannot tell when it has seen that
        is_refused = any(link.get("refused") for link in found.values())
        desk.serve_until(answered, deadline, is_refused)
    say(found)


def measure_all(
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


if __name__ == "__main__":
    main()
