"""Records of an event file (TFRecord): what is damaged is told by its checksum and left out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_HEADER = struct.Struct("<QI")  # the length of the data, and the length's checksum
_FOOTER = 4  # bytes of the data's checksum
_FRAME = _HEADER.size + _FOOTER
_ALL = 0xFFFFFFFF
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its lowest bit first
_LEVELS = 30
_CHUNK = 2**18  # words that are looked at together, which bounds memory

Span = tuple[int, int]


def records(content: bytes) -> tuple[list[tuple[Span, bytes]], list[Span]]:
    """Return the whole records of a file, and the parts of it that are none.

    After a damaged length, reading goes on at the next record whose length has its checksum.
    """
    framed: list[Span] = []
    lost: list[Span] = []
    place = 0
    while place < len(content):
        end = _end_of_record(content, place)
        span = place, end or _next_record(content, place + 1)
        (framed if end else lost).append(span)
        place = span[1]
    datas = [content[begin + _HEADER.size : end - _FOOTER] for begin, end in framed]
    whole = []
    for span, data, checksum in zip(framed, datas, checksums(datas), strict=True):
        if int.from_bytes(content[span[1] - _FOOTER : span[1]], "little") == checksum:
            whole.append((span, data))
        else:
            lost.append(span)
    return whole, sorted(lost)


def checksums(datas: Sequence[bytes]) -> list[int]:
    """Return the masked CRC-32C of many byte strings, -1 for those of less than four bytes."""
    found = [-1] * len(datas)
    alike: dict[int, list[int]] = {}  # those that fill so many words, a power of two
    for index, data in enumerate(datas):
        if len(data) >= 4:
            alike.setdefault(1 << ((len(data) - 1) // 4).bit_length(), []).append(index)
    for words, indices in alike.items():
        most = max(_CHUNK // words, 1)
        for first in range(0, len(indices), most):
            some = indices[first : first + most]
            # Zeros in front change nothing, as long as the register begins with zero; that it
            # begins with ones is the same as the first four bytes inverted.
            rows = np.zeros((len(some), 4 * words), np.uint8)
            for row, index in zip(rows, some, strict=True):
                data = datas[index]
                row[-len(data) :] = np.frombuffer(data, np.uint8)
                row[len(row) - len(data) :][:4] ^= 0xFF
            for index, crc in zip(some, _masked(_register(rows.view("<u4"))), strict=True):
                found[index] = int(crc)
    return found


def _end_of_record(content: bytes, begin: int) -> int | None:
    """Where a record ends, None if none begins there or the file is too short for it."""
    if begin + _FRAME > len(content):
        return None
    length, checksum = _HEADER.unpack_from(content, begin)
    end = begin + _FRAME + length
    if end > len(content):
        return None
    register = _ALL
    for byte in content[begin : begin + 8]:
        register = _BYTES[(register ^ byte) & 0xFF] ^ register >> 8
    return int(end) if _masked(register) == checksum else None


def _next_record(content: bytes, begin: int) -> int:
    """Where the next record begins, or the file ends."""
    view = np.frombuffer(content, np.uint8)
    for start in range(begin, len(content) - _FRAME + 1, _CHUNK):
        lengths = np.lib.stride_tricks.sliding_window_view(view[start : start + _CHUNK + 7], 8)
        places = np.flatnonzero(~lengths[:, 4:].any(axis=1))  # no record has 4 GiB
        values = lengths[places].view("<u8")[:, 0]
        for place in places[(values > 0) & (values < len(content))].tolist():
            if _end_of_record(content, start + place) is not None:
                return start + place
    return len(content)


def _masked(register: Any) -> Any:
    crc = register ^ _ALL
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ALL


def _register(words: Any) -> Any:
    """The register after each row of words, whose number is a power of two, from zero on."""
    width = words.shape[1]
    if width > 1 and words.size > _CHUNK:
        half = width // 2
        left, right = _register(words[:, :half]), _register(words[:, half:])
        return _after_zeros(left, _ZEROS[half.bit_length() - 1]) ^ right
    found = _after_zeros(words, _ZEROS[0])
    for level in range(width.bit_length() - 1):
        found = _after_zeros(found[:, 0::2], _ZEROS[level]) ^ found[:, 1::2]
    return found[:, 0]


def _after_zeros(register: Any, tables: Any) -> Any:
    """The register after bytes of zero, whose tables have what becomes of each of its bytes."""
    first, second, third, fourth = tables
    found = first[register & 0xFF] ^ second[register >> 8 & 0xFF]
    return found ^ third[register >> 16 & 0xFF] ^ fourth[register >> 24]


def _tables() -> tuple[list[int], list[Any]]:
    """Tables for one byte, and for 4, 8, 16, .. bytes of zero."""
    values = np.arange(256, dtype=np.uint32)
    after = values
    for _ in range(8):
        after = np.where(after & 1, after >> 1 ^ _POLYNOMIAL, after >> 1).astype(np.uint32)
    zeros = [np.stack([after, values, values << 8, values << 16])]
    for _ in range(_LEVELS + 1):
        zeros.append(_after_zeros(zeros[-1], zeros[-1]))
    return after.tolist(), zeros[2:]


_BYTES, _ZEROS = _tables()
