"""One connection of a server: what is asked on it, and answers that come when they are ready."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import grpc

from keras_het.exchange.message import Message, ProtocolError, decode, encode
from keras_het.exchange.secret import Keys
from keras_het.exchange.wire import code_of, refusal

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
    """Reads requests in a thread of its own, and yields answers in the order they are ready in."""

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
