"""A server of messages: where it listens, who may connect, and how much it holds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeAlias

import grpc

from keras_het.exchange import wire
from keras_het.exchange.message import LARGEST_MESSAGE, Message, ProtocolError, decode, encode
from keras_het.exchange.secret import NONCE_BYTES, Keys, Nonces, make_keys
from keras_het.exchange.wire import code_of, read_certificates, refusal

Handle = Callable[[Message], "Message | Future[Message]"]


class Budget:
    """Bytes of requests and answers that a server may hold at a time."""

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            if self.held + size > self._most:
                raise MemoryError(
                    f"The server holds {self.held} bytes of messages that wait. Received: {size} "
                    f"more; expected: {self._most} in all. Send smaller messages, or fewer at once."
                )
            self.held += size

    def give(self, size: int) -> None:
        with self._lock:
            self.held -= size


class Session:
    """Reads requests in a separate thread, and yields answers in the order they are ready in."""

    # A request that waits occupies no thread.

    def __init__(self, keys: Keys, handle: Handle, largest_message: int, budget: Budget) -> None:
        self._keys, self._handle, self._largest = keys, handle, largest_message
        self._budget = budget
        self._answers: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._number = 0
        # Bytes of each request, then of its answer; None when the connection has ended.
        self._held: dict[int, int] | None = {}
        self._lock = threading.Lock()

    def run(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the pieces of answers until the connection ends."""
        gone = ConnectionError("The other side has gone.")
        if not context.add_callback(lambda: self.end(gone)):
            return
        threading.Thread(
            target=self._read, args=(requests,), name="keras_het-requests", daemon=True
        ).start()
        try:
            while not isinstance(answer := self._answers.get(), Exception):
                yield from encode(answer, self._keys.answers)
                self._release(answer.number)
            context.abort(code_of(answer), str(answer))
        finally:
            self._release_all()

    def end(self, error: Exception) -> None:
        """End the connection after the answers that are ready."""
        self._answers.put(error)

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for request in decode(requests, self._keys.requests, self._largest, self._admit):
                self._start(request)
        except grpc.RpcError:
            self.end(ConnectionError("The other side has gone."))
        except Exception as error:
            self.end(error)
        else:
            self.end(ConnectionError("The other side has closed the connection."))

    def _admit(self, size: int) -> None:
        self._hold(self._number + 1, size)
        self._number += 1

    def _hold(self, number: int, size: int) -> None:
        """Count the bytes of a request, or of its answer in their place until that is sent."""
        with self._lock:
            if self._held is None:
                raise ConnectionError("The connection has ended.")
            self._budget.take(size - self._held.get(number, 0))
            self._held[number] = size

    def _start(self, request: Message) -> None:
        if request.number != self._number:
            raise ProtocolError(
                f"A message is out of order. Received: {request.number}; expected: {self._number}."
            )
        answer_to(self._handle, request).add_done_callback(
            lambda done: self._answer(done, request.number)
        )

    def _answer(self, done: Future[Message], number: int) -> None:
        error = done.exception()
        answer = done.result() if error is None else refusal(error)
        try:
            self._hold(number, sum(vector.nbytes for vector in answer.vectors))
        except (ConnectionError, MemoryError) as error:
            self.end(error)
        else:
            self._answers.put(answer._replace(number=number))

    def _release(self, number: int) -> None:
        with self._lock:
            self._budget.give(0 if self._held is None else self._held.pop(number, 0))

    def _release_all(self) -> None:
        with self._lock:
            self._budget.give(sum((self._held or {}).values()))
            self._held = None


def answer_to(handle: Handle, request: Message) -> Future[Message]:
    """Return the future of an answer, whether it is there already, fails or waits."""
    done: Future[Message] = Future()
    try:
        answer = handle(request)
        if isinstance(answer, Future):
            return answer
        done.set_result(answer)
    except Exception as error:
        done.set_exception(error)
    return done


Handler: TypeAlias = "Callable[[int, Message], Message | Future[Message]]"
"""Takes the number of the sender and its request; returns the answer or, as it must not wait for
other processes, a future of it."""
_EVERY_ADDRESS = ("", "*", "0.0.0.0", "[::]", "::")
_END_SECONDS = 2.0


class Server:
    """Answers the requests of those that know the credential of a service."""

    # Metadata decide whether a connection is refused, before any message is read. One that makes
    # the server hold more than `most_bytes` ends: a wait could keep others from what they wait for.

    def __init__(
        self,
        address: str,
        largest_message: int = LARGEST_MESSAGE,
        most_bytes: int = 2**32,
        most_connections: int = 1024,
    ) -> None:
        self._largest = largest_message
        self.budget = Budget(most_bytes)
        self._services: dict[str, tuple[bytes, Handler]] = {}
        self._ending: set[str] = set()
        self._sessions: dict[str, set[Session]] = {}
        self._nonces = Nonces()
        self._lock = threading.Lock()
        self._server = grpc.server(
            _Threads(), maximum_concurrent_rpcs=most_connections, options=wire.options()
        )
        # Both take streams, so that nothing is read of what a stranger sends along.
        methods = {
            wire.HELLO: grpc.stream_unary_rpc_method_handler(self._hello),
            wire.OPEN: grpc.stream_stream_rpc_method_handler(self._open),
        }
        handler = grpc.method_handlers_generic_handler(wire.ROOM, methods)
        self._server.add_generic_rpc_handlers((handler,))
        self.address = self._bind(address)

    def _bind(self, address: str) -> str:
        host = address.rpartition(":")[0]
        if host in _EVERY_ADDRESS:
            raise ValueError(
                "A server listens on one address, not on all networks of its machine. Received: "
                f"{address!r}. Give one that only the machines of the cluster reach."
            )
        certificates = read_certificates()
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, certificates.server_credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise OSError(
                f"The server at {address} did not start: somebody listens there, or this machine "
                "does not have the address. End the process that an earlier run has left, or give "
                "another port."
            )
        return f"{host}:{port}"

    def serve(self, service: str, credential: bytes, handler: Handler) -> None:
        """Add a service; one of the same name ends, with its connections."""
        with self._lock:
            self._services[service] = credential, handler
            self._ending.discard(service)
            ended = self._sessions.pop(service, set())
        for session in ended:
            session.end(ConnectionError("The service has started again."))

    def end(self, service: str) -> None:
        """Let a service end: who does not know its credential may be of the next one, and waits."""
        self._ending.add(service)

    def withdraw(self, service: str) -> None:
        """Remove a service, with its connections."""
        with self._lock:
            self._services.pop(service, None)
            ended = self._sessions.pop(service, set())
        for session in ended:
            session.end(ConnectionError("The service has ended."))

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        """End all connections, whatever waits on them, and release the port."""
        with self._lock:
            self._services.clear()
            ended = set().union(*self._sessions.values())
            self._sessions.clear()
        for session in ended:
            session.end(ConnectionError("The server has ended."))
        self._server.stop(_END_SECONDS).wait(2 * _END_SECONDS)

    def _hello(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return self._nonces.give()

    def _open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        service, keys, handle = self._admit(context)
        session = Session(keys, handle, self._largest, self.budget)
        with self._lock:
            if self._services.get(service, (b"", None))[1] is not handle.func:
                context.abort(grpc.StatusCode.UNAVAILABLE, "The service has started again.")
            self._sessions.setdefault(service, set()).add(session)
        try:
            context.send_initial_metadata(((wire.PROOF, keys.answer),))
            yield from session.run(requests, context)
        finally:
            with self._lock:
                self._sessions.get(service, set()).discard(session)

    def _admit(self, context: grpc.ServicerContext) -> tuple[str, Keys, Any]:
        """Check the proof in the metadata of a connection, or end it."""
        given = dict(context.invocation_metadata())
        try:
            service, sender = given[wire.SERVICE], int(given[wire.SENDER])
            nonce, own = given[wire.NONCE], given[wire.CLIENT_NONCE]
            proof = given[wire.PROOF]
        except (KeyError, ValueError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "A connection without a proof.")
        if service not in self._services:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"There is no service {service!r} here.")
        if len(own) != NONCE_BYTES or not self._nonces.take(nonce):
            context.abort(grpc.StatusCode.ABORTED, "A proof is good for one connection.")
        credential, handler = self._services[service]
        keys = make_keys(credential, service, sender, nonce, own)
        if not keys.is_shown(proof) and service in self._ending:
            context.abort(grpc.StatusCode.UNAVAILABLE, "The training here is ending.")
        if not keys.is_shown(proof):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "The shared secret or the cluster differs. Use the same for all tasks.",
            )
        return service, keys, partial(handler, sender)


class _Threads(Executor):
    """A thread for each call, which lets the process end, unlike a pool's threads."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="keras_het-answers", daemon=True).start()
        return future
