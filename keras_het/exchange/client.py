"""A client of messages: one connection to one service of a server."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from concurrent.futures import Future, InvalidStateError

import grpc

from keras_het.exchange import wire
from keras_het.exchange.message import LARGEST_MESSAGE, Message, ProtocolError, decode, encode
from keras_het.exchange.secret import NONCE_BYTES, Keys, make_keys
from keras_het.exchange.wire import error_of, raise_if_refused, read_certificates

_MOST_HELLOS = 5


class Client:
    """Sends requests to a service, any number at a time."""

    # What waits for an answer fails as the connection breaks; `connect` opens another one.

    def __init__(
        self,
        address: str,
        service: str,
        credential: bytes,
        sender: int = 0,
        ping_seconds: float = 30.0,
    ) -> None:
        self.address, self._service = address, service
        self._credential, self._sender = credential, sender
        self._stream: _Stream | None = None
        self._lock = threading.Lock()
        certificates, options = read_certificates(), wire.options(ping_seconds)
        if certificates is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, certificates.client_credentials, options)
        self._hello = self._channel.unary_unary(f"/{wire.ROOM}/{wire.HELLO}")
        self._open = self._channel.stream_stream(f"/{wire.ROOM}/{wire.OPEN}")

    def is_there(self, timeout_seconds: float) -> bool:
        """Return whether a server answers at all."""
        try:
            self._hello(b"", timeout=timeout_seconds)
        except (grpc.RpcError, ValueError):  # or this client was closed
            return False
        return True

    @property
    def is_connected(self) -> bool:
        return self._stream is not None and self._stream.error is None

    def connect(self, timeout_seconds: float) -> None:
        """Connect unless there is a connection; raise an error of `errors.py` if that fails."""
        if not self._lock.acquire(timeout=timeout_seconds):  # another thread is trying
            raise TimeoutError(f"{self.address} did not answer within {timeout_seconds:g} s.")
        try:
            for _ in range(_MOST_HELLOS):
                if self.is_connected:
                    return
                with contextlib.suppress(InterruptedError):
                    self._stream = self._connect(timeout_seconds)
                    return
            raise ConnectionError(f"{self.address} admits nobody.")
        finally:
            self._lock.release()

    def _connect(self, timeout_seconds: float) -> _Stream:
        try:
            nonce = self._hello(b"", timeout=timeout_seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            text = f"{self.address} did not answer within {timeout_seconds:g} s. Received: "
            raise error_of(error.code(), text + f"{error.details()}") from None
        except ValueError:  # what gRPC raises for a channel that is closed
            raise ConnectionError(f"The connection to {self.address} was closed.") from None
        own = secrets.token_bytes(NONCE_BYTES)
        keys = make_keys(self._credential, self._service, self._sender, nonce, own)
        metadata = (
            (wire.SERVICE, self._service),
            (wire.SENDER, str(self._sender)),
            (wire.NONCE, nonce),
            (wire.CLIENT_NONCE, own),
            (wire.PROOF, keys.proof),
        )
        stream = _Stream(self._open, metadata, keys, self.address)
        try:
            stream.opened.result(timeout_seconds)
        except BaseException:
            stream.close()
            raise
        return stream

    def send(self, request: Message) -> Future[Message]:
        """Send a request over the connection that there is, without waiting for the answer."""
        stream = self._stream
        if stream is None:
            raise ConnectionError(f"There is no connection to {self.address}.")
        return stream.send(request)

    def ask(self, request: Message, timeout_seconds: float) -> Message:
        """Send a request and wait for the answer; an error of the server is raised here."""
        self.connect(timeout_seconds)
        answer = self.send(request)
        try:
            return answer.result(timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.address} did not answer within {timeout_seconds:g} s."
            ) from error

    def close(self) -> None:
        """End the connection for good; requests that wait fail."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._channel.close()


class _Stream:
    """One connection; it does not open again."""

    def __init__(
        self,
        open_: grpc.StreamStreamMultiCallable,
        metadata: tuple[tuple[str, str | bytes], ...],
        keys: Keys,
        address: str,
    ) -> None:
        self._keys, self._address = keys, address
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Message]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self.opened: Future[None] = Future()
        # No deadline: an answer may wait for others. Pings find out whether the machine is there.
        try:
            self._call = open_(iter(self._outgoing.get, None), metadata=metadata)
        except ValueError:  # of a channel that was closed meanwhile
            raise ConnectionError(f"The connection to {address} was closed.") from None
        threading.Thread(target=self._read, name="keras_het-received", daemon=True).start()

    def send(self, request: Message) -> Future[Message]:
        future: Future[Message] = Future()
        with self._lock:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            self._number += 1
            self._waiting[self._number] = future
            for piece in encode(request._replace(number=self._number), self._keys.requests):
                self._outgoing.put(piece)
        return future

    def close(self) -> None:
        self._call.cancel()
        self._fail(ConnectionError(f"The connection to {self._address} was closed."))

    def _read(self) -> None:
        try:
            self._check_server()
            self.opened.set_result(None)
            for answer in decode(self._call, self._keys.answers, LARGEST_MESSAGE):
                self._take(answer)
            error: Exception = ConnectionError(f"{self._address} has closed the connection.")
        except grpc.RpcError as broken:
            error = error_of(broken.code(), f"{self._address}: {broken.details()}")
        except Exception as wrong:
            error = wrong
        self._call.cancel()
        self._fail(error)

    def _check_server(self) -> None:
        shown = dict(self._call.initial_metadata() or ()).get(wire.PROOF)
        if shown is None:
            next(self._call, None)  # raises why there is none
        if shown != self._keys.answer:
            raise PermissionError(
                f"{self._address} does not know the shared secret. Received: another proof than "
                "its own. See what listens there."
            )

    def _take(self, answer: Message) -> None:
        with self._lock:
            future = self._waiting.pop(answer.number, None)
        if future is None:
            raise ProtocolError(f"{self._address} answers a request that nobody is waiting for.")
        try:
            future.set_result(raise_if_refused(answer, self._address))
        except Exception as error:
            future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self.error is not None:  # the other thread that ends it was faster
                return
            self.error = error
            waiting, self._waiting = self._waiting, {}
        self._outgoing.put(None)
        with contextlib.suppress(InvalidStateError):  # it was open
            self.opened.set_exception(error)
        for future in waiting.values():
            future.set_exception(error)
