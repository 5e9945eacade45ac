"""The channel to a process of the parameter service: another one, or this one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol

from keras_het.exchange.client import Client
from keras_het.exchange.message import Message

SERVICE = "center"
"""Name of the service of center and ledger on its server."""
ADVICE = ' Its process may be gone; give on_service_loss="continue" to go on without it.'
"""What to do where the loss of a service is an error."""


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


class UnknownTrainingError(ServiceLostError):
    """A process answers, and does not know this training: it was restarted, or not yet asked."""


class Channel(Protocol):
    """One participant's connection to one process of the service."""

    address: str
    timeout_seconds: float

    def start(self, request: Message) -> Future[Message]:
        """Send a request without waiting for its answer; a failure is the future's."""

    def ask(self, request: Message) -> Message:
        """Send a request and wait for its answer.

        Raises:
            ServiceLostError: if there is none in time, or the process does not know this training.
            PermissionError: if it refuses this participant.
        """

    def close(self) -> None:
        """End the connection; requests that wait fail."""


class RemoteChannel:
    """The channel to another process; it connects with the first request, and after a loss again.

    Args:
        address: of the process, "host:port".
        credential: what both sides know of secret and training.
        participant: the number of this one.
        timeout_seconds: for connecting, and for each answer.
    """

    def __init__(
        self, address: str, credential: bytes, participant: int, timeout_seconds: float
    ) -> None:
        self.address, self.timeout_seconds = address, timeout_seconds
        self._client = Client(address, SERVICE, credential, participant)

    def start(self, request: Message) -> Future[Message]:
        try:
            self._client.connect(self.timeout_seconds)
            return self._client.send(request)
        except MemoryError as error:  # the server has as many connections as it takes
            return _failed(ConnectionError(str(error)))
        except Exception as error:
            return _failed(error)

    def ask(self, request: Message) -> Message:
        return result_of(self.start(request), self)

    def close(self) -> None:
        self._client.close()


class LocalChannel:
    """The channel within the process that holds everything: objects called directly.

    Args:
        handle: takes a request and returns its answer.
    """

    timeout_seconds = 0.0

    def __init__(
        self, address: str, handle: Callable[[Message], Message | Future[Message]]
    ) -> None:
        self.address, self._handle = address, handle

    def start(self, request: Message) -> Future[Message]:
        try:
            answer = self._handle(request)
        except Exception as error:
            return _failed(error)
        if isinstance(answer, Future):
            return answer
        done: Future[Message] = Future()
        done.set_result(answer)
        return done

    def ask(self, request: Message) -> Message:
        return result_of(self.start(request), self)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def result_of(answer: Future[Message], channel: Channel) -> Message:
    """Wait for the answer to a request; raise as `Channel.ask` does, or `ValueError`."""
    with translated():
        try:
            return answer.result(channel.timeout_seconds or None)
        except TimeoutError as error:
            raise TimeoutError(
                f"{channel.address} did not answer within {channel.timeout_seconds:g} s."
            ) from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise `ServiceLostError` for what a connection raises where there is no service."""
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


def _failed(error: Exception) -> Future[Message]:
    done: Future[Message] = Future()
    done.set_exception(error)
    return done
