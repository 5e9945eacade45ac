"""Messages between processes: a fixed header, followed by vectors; nothing is ever unpickled."""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

Vector = np.ndarray[Any, np.dtype[Any]]

PIECE_BYTES = 2**22
"""A message travels in pieces of so many bytes at most, so that it may be of any length."""
LARGEST_MESSAGE = 2**30
"""Bytes of the vectors of one message that are taken, unless another limit is given."""
_MAGIC, _VERSION = b"KHET", 1
_MOST_NUMBERS, _MOST_VECTORS = 4, 2
# magic, version, kind, number of the message, its numbers, lengths of its vectors, code
_FIELDS = struct.Struct(f"<4sBB2xQ{_MOST_NUMBERS}q{_MOST_VECTORS}Q")
_CODE_BYTES = 32
HEADER_BYTES = _FIELDS.size + _CODE_BYTES


class Kind(enum.IntEnum):
    """All that a message may be: code, how many numbers it has, and the types of its vectors."""

    # None of that is the sender's choice.

    numbers: int
    types: tuple[str, ...]

    def __new__(cls, code: int, numbers: int, *types: str) -> Self:
        kind = int.__new__(cls, code)
        kind._value_, kind.numbers, kind.types = code, numbers, types
        return kind

    DONE = 1, 0
    REFUSAL = 2, 1, "<u1"  # code of gRPC; text in UTF-8
    JOIN = 3, 1  # run
    CONTRIBUTION = 4, 3, "<f4"  # run, slot, step; values
    SUM = 5, 0, "<f4"
    GROUP_SIZE = 6, 1  # number of workers
    PROBE = 7, 0, "<f4"
    DESCRIBE = 8, 0
    DESCRIPTION = 9, 1, "<u1"  # microseconds since the epoch; JSON in UTF-8
    FINISH = 10, 0
    # The center of asynchronous workers, part by part
    STATUS = 11, 2  # Status; a number that the request asks for
    PULL = 12, 2  # part; whether in full whatever the format of messages is
    # Status, version; values, number of the latest push of each worker
    VALUES = 13, 2, "<f4", "<i8"
    VALUES_16 = 14, 2, "<u2", "<i8"  # the same, with bits of 16-bit floats
    PUSH = 15, 4, "<f4"  # part, number of the push, version last seen, samples
    PUSH_16 = 16, 4, "<u2"
    PUSH_TOP = 17, 4, "<f4", "<i4"  # the same; the largest values and their places
    RESTORE = 18, 1, "<f4", "<i8"  # part; its center, latest pushes in it, or nothing
    EXPORT = 19, 1  # part
    STATE = 20, 1, "<u1", "<u1"  # part; names, types and shapes in JSON; their bytes
    LEAVE = 21, 2  # part, worker
    LATEST = 22, 0
    CLOSE_TRAINING = 23, 0
    # The ledger of global batches and samples
    CLAIM = 24, 2  # epoch, number of batches
    GRANT = 25, 3  # Status, first batch, number of batches
    REPORT = 26, 3  # number of the report, samples, Presence
    FACTS = 27, 0, "<i8"
    PACE = 28, 0, "<f8"
    PACES = 29, 0, "<f8", "<f8"
    LEAD = 30, 2, "<i8"  # number of the report, samples; facts of the training
    OVERVIEW = 31, 0, "<f8"
    DIRECTORY = 32, 0, "<u1"  # addresses, or nothing to ask for them
    OFFER = 33, 0, "<u1"  # a training in JSON


_KINDS = {int(kind): kind for kind in Kind}


class ProtocolError(ValueError):
    """What arrived is no message of this protocol, or not one for here and now."""


class Message(NamedTuple):
    """One message; `number` is the place among its sender's requests, or the request it answers."""

    kind: Kind
    numbers: tuple[int, ...] = ()
    vectors: tuple[Vector, ...] = ()
    number: int = 0


def encode(message: Message, key: bytes) -> Iterator[bytes]:
    """Yield the pieces of a message, which copy its vectors once."""
    numbers = [*message.numbers, *[0] * (_MOST_NUMBERS - len(message.numbers))]
    vectors = [
        np.ascontiguousarray(vector, kind)
        for vector, kind in zip(message.vectors, message.kind.types, strict=True)
    ]
    lengths = [*map(len, vectors), *[0] * (_MOST_VECTORS - len(vectors))]
    fields = _FIELDS.pack(_MAGIC, _VERSION, message.kind, message.number, *numbers, *lengths)
    views = [vector.data.cast("B") for vector in vectors if len(vector)]
    return _cut([memoryview(fields + _code(key, fields)), *views])


def _cut(views: Iterable[memoryview]) -> Iterator[bytes]:
    gathered: list[memoryview] = []
    room = PIECE_BYTES
    for view in views:
        while len(view):
            gathered.append(view[:room])
            room -= len(gathered[-1])
            view = view[len(gathered[-1]) :]
            if not room:
                yield b"".join(gathered)
                gathered, room = [], PIECE_BYTES
    if gathered:
        yield b"".join(gathered)


def decode(
    pieces: Iterator[bytes],
    key: bytes,
    largest: int = LARGEST_MESSAGE,
    admit: Callable[[int], None] = lambda size: None,
) -> Iterator[Message]:
    """Yield the messages that pieces make up; refuse all that are not made with the key."""
    # `admit` gets the bytes of a message's vectors before more than its first piece is read, and
    # may raise. Vectors lie in the piece where one is enough.
    for piece in pieces:
        message, lengths = _read_header(piece, key)
        types = [np.dtype(kind) for kind in message.kind.types]
        sizes = [count * kind.itemsize for count, kind in zip(lengths, types, strict=True)]
        size = sum(sizes)
        if size > largest:
            raise ProtocolError(
                f"A message is too large. Received: {size} bytes; expected: {largest} at most."
            )
        admit(size)
        body, start, vectors = _read_body(piece, pieces, size), 0, []
        for count, kind, length in zip(lengths, types, sizes, strict=True):
            vectors.append(np.frombuffer(body[start : start + length], kind, count))
            start += length
        yield message._replace(vectors=tuple(vectors))


def _read_header(piece: bytes, key: bytes) -> tuple[Message, list[int]]:
    """Check a header; its code comes first, so that no field of a stranger's is looked at."""
    fields, code = piece[: _FIELDS.size], piece[_FIELDS.size : HEADER_BYTES]
    if len(piece) < HEADER_BYTES or not hmac.compare_digest(code, _code(key, fields)):
        raise ProtocolError(
            f"A message is damaged, or was not made for this connection. Received: {len(piece)} "
            "bytes with a wrong checksum."
        )
    magic, version, code, number, *rest = _FIELDS.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION) or code not in _KINDS:
        raise ProtocolError(
            f"A message is of another version. Received: {magic!r} {version}, kind {code}; "
            f"expected: {_MAGIC!r} {_VERSION}. Install the same keras_het on all machines."
        )
    kind, numbers, lengths = _KINDS[code], rest[:_MOST_NUMBERS], rest[_MOST_NUMBERS:]
    if any(numbers[kind.numbers :]) or any(lengths[len(kind.types) :]):
        raise ProtocolError(f"A message has fields that {kind.name} does not have.")
    return Message(kind, tuple(numbers[: kind.numbers]), (), number), lengths[: len(kind.types)]


def _read_body(first: bytes, pieces: Iterator[bytes], size: int) -> memoryview:
    parts = [memoryview(first)[HEADER_BYTES:]]
    missing = size - len(parts[0])
    while missing > 0:
        part = next(pieces, b"")
        if not part:
            raise ProtocolError(f"A message ends early. Received: {missing} bytes too few.")
        parts.append(memoryview(part))
        missing -= len(part)
    if missing:
        raise ProtocolError(f"A message is longer than it says. Received: {-missing} bytes more.")
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _code(key: bytes, fields: bytes) -> bytes:
    return hmac.digest(key, fields, "sha256")


class Status(enum.IntEnum):
    """The service's verdict.

    OK: done. WAIT: not now; ask again. NOT_FINITE: the values, or what they would make of the
    center, are not finite. STALE: the worker saw the center too long ago. REPEATED: a push that was
    taken before. CLOSED: the training has ended. NO_CENTER: the process was restarted, and its
    leader has yet to restore the center.
    """

    OK = 0
    NOT_FINITE = 2
    WAIT = 4
    STALE = 5
    REPEATED = 6
    CLOSED = 7
    NO_CENTER = 8


NO_ANSWER = -1
