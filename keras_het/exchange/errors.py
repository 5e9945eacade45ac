"""Errors as they travel: each kind of exception has a status code of gRPC."""

from __future__ import annotations

import grpc
import numpy as np

from keras_het.exchange.message import Kind, Message

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (PermissionError, grpc.StatusCode.UNAUTHENTICATED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (MemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
    (ConnectionError, grpc.StatusCode.UNAVAILABLE),
    (InterruptedError, grpc.StatusCode.ABORTED),  # to be tried again
    (RuntimeError, grpc.StatusCode.INTERNAL),
)
_LONGEST_TEXT = 2000


def code_of(error: BaseException) -> grpc.StatusCode:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(code: grpc.StatusCode | int | None, text: str) -> Exception:
    """Return the exception that a status code stands for; of unknown ones a `ConnectionError`."""
    for kind, known in _CODES:
        if code in (known, known.value[0]):
            return kind(text)
    return ConnectionError(text)


def refusal(error: BaseException) -> Message:
    """Return the answer to a request that ended with an error."""
    text = np.frombuffer(str(error)[:_LONGEST_TEXT].encode(), np.uint8)
    return Message(Kind.REFUSAL, (code_of(error).value[0],), (text,))


def raise_if_refused(answer: Message, address: str) -> Message:
    if answer.kind is not Kind.REFUSAL:
        return answer
    text = answer.vectors[0].tobytes().decode(errors="replace")
    raise error_of(answer.numbers[0], f"{address}: {text}")
