"""Messages between processes: a fixed header, and vectors behind it; nothing is ever unpickled."""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
    """All that a message may be."""

    DONE = 1
    REFUSAL = 2
    JOIN = 3
    CONTRIBUTION = 4
    SUM = 5
    GROUP_SIZE = 6
    PROBE = 7
    DESCRIBE = 8
    DESCRIPTION = 9
    FINISH = 10
    STATUS = 11
    PULL = 12
    VALUES = 13
    VALUES_16 = 14
    PUSH = 15
    PUSH_16 = 16
    PUSH_TOP = 17
    RESTORE = 18
    EXPORT = 19
    STATE = 20
    SIGNAL = 21
    LATEST = 22
    CLOSE_TRAINING = 23
    CLAIM = 24
    GRANT = 25
    REPORT = 26
    FACTS = 27
    PACE = 28
    PACES = 29
    LEAD = 30
    OVERVIEW = 31
    DIRECTORY = 32
    OFFER = 33


class _Layout(NamedTuple):
    numbers: int
    types: tuple[str, ...]


# A kind says how many numbers a message has, and of which type its vectors are: none of that is
# the sender's choice.
_LAYOUTS = {
    Kind.DONE: _Layout(0, ()),
    Kind.REFUSAL: _Layout(1, ("<u1",)),  # code of gRPC; text in UTF-8
    Kind.JOIN: _Layout(1, ()),  # run
    Kind.CONTRIBUTION: _Layout(3, ("<f4",)),  # run, slot, step; values
    Kind.SUM: _Layout(0, ("<f4",)),
    Kind.GROUP_SIZE: _Layout(1, ()),  # number of workers
    Kind.PROBE: _Layout(0, ("<f4",)),
    Kind.DESCRIBE: _Layout(0, ()),
    Kind.DESCRIPTION: _Layout(1, ("<u1",)),  # microseconds since the epoch; JSON in UTF-8
    Kind.FINISH: _Layout(0, ()),
    # The center of asynchronous workers, part by part
    Kind.STATUS: _Layout(2, ()),  # Status; a number that the request asks for
    Kind.PULL: _Layout(2, ()),  # part; whether in full whatever the format of messages is
    Kind.VALUES: _Layout(3, ("<f4",)),  # Status, version, whether the push waited; values
    Kind.VALUES_16: _Layout(3, ("<u2",)),  # the same, with bits of 16-bit floats
    Kind.PUSH: _Layout(4, ("<f4",)),  # part, number of the push, version last seen, samples
    Kind.PUSH_16: _Layout(4, ("<u2",)),
    Kind.PUSH_TOP: _Layout(4, ("<f4", "<i4")),  # the same; the largest values and their places
    Kind.RESTORE: _Layout(1, ("<f4",)),  # part; its center
    Kind.EXPORT: _Layout(1, ()),  # part
    Kind.STATE: _Layout(1, ("<u1", "<u1")),  # part; names, types and shapes in JSON; their bytes
    Kind.SIGNAL: _Layout(3, ()),  # part, worker, Signal
    Kind.LATEST: _Layout(0, ()),
    Kind.CLOSE_TRAINING: _Layout(0, ()),
    # The ledger of global batches and samples
    Kind.CLAIM: _Layout(2, ()),  # epoch, number of batches
    Kind.GRANT: _Layout(3, ()),  # Status, first batch, number of batches
    Kind.REPORT: _Layout(3, ()),  # number of the report, samples, Presence
    Kind.FACTS: _Layout(0, ("<i8",)),
    Kind.PACE: _Layout(0, ("<f8",)),
    Kind.PACES: _Layout(0, ("<f8", "<f8")),
    Kind.LEAD: _Layout(2, ("<i8",)),  # number of the report, samples; facts of the training
    Kind.OVERVIEW: _Layout(0, ("<f8",)),
    Kind.DIRECTORY: _Layout(0, ("<u1",)),  # addresses, or nothing to ask for them
    Kind.OFFER: _Layout(0, ("<u1",)),  # a training in JSON
}


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
    layout = _LAYOUTS[message.kind]
    numbers = [*message.numbers, *[0] * (_MOST_NUMBERS - len(message.numbers))]
    vectors = [
        np.ascontiguousarray(vector, kind)
        for vector, kind in zip(message.vectors, layout.types, strict=True)
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
    """Yield the messages that pieces make up; their vectors lie in the pieces where one is enough.

    Args:
        pieces: what arrives.
        key: that of the sender on this connection.
        largest: the largest number of bytes of a message's vectors.
        admit: called with that number before more is read than the first piece; may raise.

    Raises:
        ProtocolError: for anything but messages that are made with the key.
    """
    for piece in pieces:
        message, lengths = _read_header(piece, key)
        types = [np.dtype(kind) for kind in _LAYOUTS[message.kind].types]
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
            "bytes without a right code."
        )
    magic, version, kind, number, *rest = _FIELDS.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION) or kind not in _LAYOUTS:
        raise ProtocolError(
            f"A message is of another version. Received: {magic!r} {version}, kind {kind}; "
            f"expected: {_MAGIC!r} {_VERSION}. Install the same keras_het on all machines."
        )
    layout = _LAYOUTS[Kind(kind)]
    numbers, lengths = rest[:_MOST_NUMBERS], rest[_MOST_NUMBERS:]
    if any(numbers[layout.numbers :]) or any(lengths[len(layout.types) :]):
        raise ProtocolError(f"A message has fields that {Kind(kind).name} does not have.")
    message = Message(Kind(kind), tuple(numbers[: layout.numbers]), (), number)
    return message, lengths[: len(layout.types)]


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
