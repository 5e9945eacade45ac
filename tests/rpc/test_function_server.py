"""Functions answer over RPC until their server is closed; the client tells what went wrong."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile

import keras
import pytest
import tensorflow as tf
from addresses import free_address
from devices import create_logical_devices

from keras_het.rpc.admission import Gate, Status
from keras_het.rpc.channel import FunctionClient, NoAnswerError
from keras_het.rpc.server import FunctionServer, hello_function

NUMBER = tf.TensorSpec([], tf.int32)


def serve(address, amount):
    server = FunctionServer(address)
    variable = tf.Variable(amount, trainable=False)

    @tf.function(input_signature=[NUMBER])
    def add(value):
        return tf.constant(int(Status.OK)), variable + value

    server.register("add", add, Gate(b""))
    server.start()
    return server


def ask(client, value=1, function="add"):
    return int(client.ask(function, [tf.constant(value)], (NUMBER, NUMBER))[1])


@pytest.fixture
def address(logical_devices):
    return free_address()


@pytest.fixture(scope="module")
def server():
    """Stays open for all tests that only ask it."""
    create_logical_devices()
    server = serve(free_address(), 10)
    yield server
    server.close()


@pytest.fixture
def client(server, logical_devices):
    return FunctionClient(server.address, b"", 10)


def test_answers_until_it_is_closed_and_leaves_its_port(address):
    server = serve(address, 10)
    assert ask(FunctionClient(address, b"", 10)) == 11
    server.close()
    with pytest.raises(NoAnswerError, match=r"did not answer within 0\.5 s"):
        ask(FunctionClient(address, b"", 0.5))
    host, port = address.split(":")
    with socket.socket() as taken:  # raises if the port is still held
        taken.bind((host, int(port)))


@pytest.mark.full
def test_another_server_at_the_same_address_answers_old_clients(address):
    server, client = serve(address, 10), FunctionClient(address, b"", 10)
    assert ask(client) == 11
    server.close()
    second = serve(address, 20)
    assert ask(client) == 21
    second.close()


def test_goes_on_after_keras_has_cleared_its_session(client):
    assert ask(client) == 11
    keras.backend.clear_session()
    assert ask(client, 5) == 15


def test_an_unknown_function_is_told_from_a_lost_server(address, client):
    with pytest.raises(NoAnswerError, match="not registered") as caught:
        ask(client, function="subtract")
    assert caught.value.is_unknown_function
    with pytest.raises(NoAnswerError) as caught:
        ask(FunctionClient(address, b"", 0.5))
    assert not caught.value.is_unknown_function


def test_an_address_in_use_is_an_error(server, client):
    with pytest.raises(RuntimeError, match="did not start"):
        serve(server.address, 20)
    gc.collect()
    assert ask(client) == 11


@pytest.mark.full
def test_a_server_that_did_not_start_does_not_end_a_later_one(address):
    first = FunctionServer(address)
    first.register("hello", hello_function(), Gate(b""))
    host, port = address.split(":")
    listening = socket.create_server((host, int(port)))
    with pytest.raises(RuntimeError, match="Close the one of this process"):
        first.start()
    listening.close()
    second = serve(address, 20)
    del first
    gc.collect()
    assert ask(FunctionClient(address, b"", 10)) == 21
    second.close()


IS_PUSHED_TO_AT_ITS_END = """
import subprocess, sys
import tensorflow as tf
from keras_het.asynchronous.parameter_service import ParameterClient, ParameterService, Partitions
from keras_het.asynchronous.rules import AsyncSGD

code, address, role = sys.argv[1:]
proof, partitions = b"of this test", Partitions(((400_000,),), 100_000)

def push():
    client = ParameterClient(address, partitions, proof, 0, timeout_seconds=2.0)
    gradients, versions = [tf.ones([100_000])] * 4, tf.zeros([4], tf.int64)
    is_taken = False
    while True:
        answer = client.push(gradients, versions, 1, gradients)
        if answer.statuses.numpy().any():
            assert is_taken, "no push was taken"
            return
        if not is_taken:
            is_taken = True
            print("taken", flush=True)

if role == "pushes":  # a process of its own: threads of this one would crash it as it ends
    push()
else:
    service = ParameterService(address, partitions, AsyncSGD(0.1, momentum=0.5), proof, 2)
    service.start()
    command = [sys.executable, "-c", code, code, address, "pushes"]
    pushes = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    print(pushes.pid, flush=True)
    assert pushes.stdout.readline() == "taken\\n"
"""


@pytest.mark.full
def test_a_process_ends_well_while_it_is_pushed_to(address):
    for _ in range(3):
        code = IS_PUSHED_TO_AT_ITS_END
        command = [sys.executable, "-c", code, code, free_address(), "is pushed to"]
        # not a pipe, which the process that pushes would keep open
        with tempfile.TemporaryFile("w+") as output:
            ended = subprocess.run(command, stdout=output, stderr=output, timeout=120)
            output.seek(0)
            text = output.read()
        pusher = next(int(line) for line in text.splitlines() if line.isdigit())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pusher, signal.SIGKILL)
        assert ended.returncode == 0, text[-2000:]


def test_many_calls_are_under_way_at_once_in_a_graph(client):
    @tf.function
    def ask_all():
        calls = [client.call("add", [tf.constant(value)], (NUMBER, NUMBER)) for value in range(5)]
        return [call.get_value()[1] for call in calls]

    assert [int(value) for value in ask_all()] == [10, 11, 12, 13, 14]


@pytest.mark.full
def test_an_answer_that_is_dropped_while_a_function_is_traced_leaves_no_trace(client):
    answers = [client.call("add", [tf.constant(1)], (NUMBER, NUMBER))]
    assert bool(answers[0].is_ok())

    @tf.function
    def double(value):
        answers.clear()
        gc.collect()
        return 2 * value

    operations = double.get_concrete_function(NUMBER).graph.get_operations()
    assert not any("RpcFuture" in operation.type for operation in operations)
    assert int(double(4)) == 8
