"""Messages come back as they were sent; anything else is refused before it is looked at."""

import numpy as np
import pytest

from keras_het.exchange import message as messages
from keras_het.exchange.message import HEADER_BYTES, Kind, Message, ProtocolError, decode, encode

KEY = b"k" * 32
EXAMPLES = [
    Message(Kind.DONE, number=3),
    Message(Kind.REFUSAL, (16,), (np.frombuffer(b"no", np.uint8),), 2**64 - 1),
    Message(Kind.JOIN, (-(2**63),)),
    Message(Kind.CONTRIBUTION, (2**63 - 1, 0, 7), (np.float32([1.5, -0.0, np.inf, np.nan]),), 1),
    Message(Kind.CONTRIBUTION, (1, 2, 3), (np.zeros(0, np.float32),), 1),
    Message(Kind.SUM, (), (np.arange(1000, dtype=np.float32),), 1),
]


def same(one, other):
    assert one._replace(vectors=()) == other._replace(vectors=())
    assert [v.dtype for v in one.vectors] == [v.dtype for v in other.vectors]
    assert [v.tobytes() for v in one.vectors] == [v.tobytes() for v in other.vectors]


@pytest.mark.parametrize("piece", [HEADER_BYTES, HEADER_BYTES + 1, 1000, 2**22])
def test_there_and_back_in_pieces_of_any_length(monkeypatch, piece):
    monkeypatch.setattr(messages, "PIECE_BYTES", piece)
    pieces = [piece for each in EXAMPLES for piece in encode(each, KEY)]
    assert max(map(len, pieces)) <= piece
    for sent, received in zip(EXAMPLES, decode(iter(pieces), KEY), strict=True):
        same(sent, received)


def test_vectors_are_not_copied_where_they_arrive():
    (piece,) = encode(EXAMPLES[-1], KEY)
    (received,) = decode(iter([piece]), KEY)
    assert np.shares_memory(received.vectors[0], np.frombuffer(piece, np.uint8))


def test_a_message_that_is_too_large_is_refused_before_the_rest_is_read(monkeypatch):
    monkeypatch.setattr(messages, "PIECE_BYTES", 1000)
    pieces = encode(EXAMPLES[-1], KEY)
    with pytest.raises(ProtocolError, match="4000 bytes; expected: 3999 at most"):
        next(decode(pieces, KEY, largest=3999))
    assert len(list(pieces)) == 4  # all but the first
    admitted = []
    list(decode(encode(EXAMPLES[-1], KEY), KEY, 4000, admitted.append))
    assert admitted == [4000]


def sealed(fields):
    return fields + messages._code(KEY, fields)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (0, b"XXXX", "another version"),
        (1, 2, "another version"),
        (2, 0, "another version"),
        (2, 77, "another version"),
        (5, 1, "fields that JOIN does not have"),
        (8, 1, "fields that JOIN does not have"),
    ],
)
def test_wrong_headers_with_a_right_code(place, value, match):
    fields = [b"KHET", 1, int(Kind.JOIN), 1, 5, 0, 0, 0, 0, 0]
    good = sealed(messages._FIELDS.pack(*fields))
    assert next(decode(iter([good]), KEY)).numbers == (5,)
    fields[place] = value
    with pytest.raises(ProtocolError, match=match):
        next(decode(iter([sealed(messages._FIELDS.pack(*fields))]), KEY))


def test_pieces_that_do_not_fit(monkeypatch):
    (whole,) = encode(EXAMPLES[-1], KEY)
    for wrong in ([whole + b"x"], [whole[:-1], b"xx"], [whole[:-1]], [whole[:-1], b""]):
        with pytest.raises(ProtocolError, match=r"ends early|longer than it says"):
            list(decode(iter(wrong), KEY))


def test_no_change_of_a_header_passes():
    """Each bit of it, other lengths, other keys, other bytes: all are refused by the code."""
    (whole,) = encode(EXAMPLES[3], KEY)
    for place in range(HEADER_BYTES * 8):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(ProtocolError, match="with a wrong checksum"):
            next(decode(iter([bytes(changed)]), KEY))
    others = [whole[:length] for length in range(HEADER_BYTES)]
    random = np.random.default_rng(0)
    others += [random.bytes(random.integers(300)) for _ in range(3000)]
    for piece, key in (*((other, KEY) for other in others), (whole, KEY[:-1] + b"x")):
        with pytest.raises(ProtocolError, match="with a wrong checksum"):
            next(decode(iter([piece]), key))
