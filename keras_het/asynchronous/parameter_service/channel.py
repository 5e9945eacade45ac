"""The channel to a process of the parameter service: another one, or this one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from keras_het.exchange.client import Client
from keras_het.exchange.message import Message
from keras_het.exchange.session import Handle, answer_to

SERVICE = "center"
"""Name of the service of center and ledger on its server."""
ADVICE = ' Its process may be gone; give on_service_loss="continue" to continue without it.'
"""What to do where the loss of a service is an error."""


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


class UnknownTrainingError(ServiceLostError):
    """A process answers, and does not know this training: it was restarted, or not yet asked."""


class Channel:
    """The channel to a process of the service: this one, where `handle` is called, or another.

    `timeout_seconds` is for each answer, and for connecting; 0 for no limit.
    """

    def __init__(self, address: str, handle: Handle, timeout_seconds: float = 0.0) -> None:
        self.address, self._handle, self.timeout_seconds = address, handle, timeout_seconds

    def start(self, request: Message) -> Future[Message]:
        """Send a request without waiting for its answer; a failure is the future's."""
        return answer_to(self._handle, request)

    def ask(self, request: Message) -> Message:
        """Send a request and wait for its answer; raise as `translated` does if there is none."""
        return result_of(self.start(request), self)

    def close(self) -> None:
        """End the connection, if there is one; requests that wait fail."""


class RemoteChannel(Channel):
    """The channel to another process; it connects with its first request and after a loss."""

    def __init__(
        self, address: str, credential: bytes, participant: int, timeout_seconds: float
    ) -> None:
        super().__init__(address, self._send, timeout_seconds)
        self._client = Client(address, SERVICE, credential, participant)

    def _send(self, request: Message) -> Future[Message]:
        if self._client.is_connected:
            return self._client.send(request)
        # Several processes that do not answer are waited for side by side.
        answer: Future[Message] = Future()
        connect = partial(self._connect_and_send, request, answer)
        threading.Thread(target=connect, name="keras_het-connects", daemon=True).start()
        return answer

    def _connect_and_send(self, request: Message, answer: Future[Message]) -> None:
        try:
            self._client.connect(self.timeout_seconds)
            self._client.send(request).add_done_callback(partial(pass_on, answer))
        except MemoryError as error:  # the server has as many connections as it takes
            answer.set_exception(ConnectionError(str(error)))
        except Exception as error:
            answer.set_exception(error)

    def close(self) -> None:
        self._client.close()


def pass_on(call: Future[Message], done: Future[Message]) -> None:
    """End a call as another one has ended."""
    error = done.exception()
    if error is None:
        call.set_result(done.result())
    else:
        call.set_exception(error)


def result_of(answer: Future[Message], channel: Channel, seconds: float | None = None) -> Message:
    """Wait for the answer to a request, by default for the time-out."""
    with translated():
        try:
            return answer.result((channel.timeout_seconds if seconds is None else seconds) or None)
        except TimeoutError as error:
            raise TimeoutError(
                f"{channel.address} did not answer within {channel.timeout_seconds:g} s."
            ) from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise `ServiceLostError` where there is no service, or one that does not know the training.

    A refusal of this participant remains a `PermissionError`.
    """
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"The parameter service refused this worker: its shared secret, model (names, shapes "
            "and types of the weights), update rule with its settings, messages (wire, "
            f"partition_bytes) or number differs. Received: {error} Use the same script, TF_CONFIG "
            "cluster and secret on every task."
        ) from error
    except NotImplementedError as error:
        raise UnknownTrainingError(f"The parameter service at {error}{ADVICE}") from error
    except (ConnectionError, TimeoutError) as error:
        raise ServiceLostError(f"The parameter service at {error}{ADVICE}") from error
