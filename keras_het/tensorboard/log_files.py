"""The event files of a training, read within bounds, whoever opens them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_het.tensorboard.log_content import LogContent, Value, has_time, log_content

# A log has 20,000 steps one by one: with 200 replicas 80 MB, and 60 MB of hardware.
_MOST_BYTES, _MOST_RECORDS = 2**28, 1_000_000
_MOST_AXES = 4
_FLOAT, _STRING = 1, 7  # of TensorFlow's DataType
# A record (TFRecord): what is damaged is told by its checksum and left out.
_HEADER = struct.Struct("<QI")  # the length of the data, and the length's checksum
_FOOTER = 4  # bytes of the data's checksum
_FRAME = _HEADER.size + _FOOTER
_ALL = 0xFFFFFFFF
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its lowest bit first
_LEVELS = 30
_CHUNK = 2**18  # words that are looked at together, which bounds memory

Span = tuple[int, int]
Read = Callable[[str, int], bytes]
Parse = Callable[[bytes], Any]


def records(content: bytes) -> tuple[list[tuple[Span, bytes]], list[Span]]:
    """Return the whole records of a file, also behind damage, and the damaged parts."""
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
    values = np.arange(256, dtype=np.uint32)
    after = values
    for _ in range(8):
        after = np.where(after & 1, after >> 1 ^ _POLYNOMIAL, after >> 1).astype(np.uint32)
    zeros = [np.stack([after, values, values << 8, values << 16])]
    for _ in range(_LEVELS + 1):
        zeros.append(_after_zeros(zeros[-1], zeros[-1]))
    return after.tolist(), zeros[2:]


_BYTES, _ZEROS = _tables()


def content_of(
    paths: Sequence[str],
    read: Read,
    parse: Parse,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> LogContent:
    """Return what the files of a training say; `messages` says how much of them was left out."""
    newest_first: list[list[Value]] = []
    messages: list[str] = []
    num_bytes = num_records = 0
    for place, path in reversed([*enumerate(paths)]):
        try:
            content = read(path, _MOST_BYTES - num_bytes + 1)
        except errors:  # thinned away or removed meanwhile
            continue
        values, lost = values_of(content, parse)
        num_bytes, num_records = num_bytes + len(content), num_records + len(values)
        if num_bytes > _MOST_BYTES or num_records > _MOST_RECORDS:
            files = "1 file was" if not place else f"{place + 1} files were"
            messages.append(f"{files} left out, the latest is {path}: the log is too large.")
            break
        if not (values or lost):
            messages.append(f"{path} holds nothing: cut off, or still being written.")
        messages += _damage(path, lost, len(content))
        newest_first.append(values)
    return log_content(_in_order(newest_first), messages)


def values_of(content: bytes, parse: Parse) -> tuple[list[Value], list[Span]]:
    """Return the values of an event file, and begin and end of the parts that cannot be read."""
    values = []
    whole, lost = records(content)
    for span, data in whole:
        try:
            event = parse(data)
        except Exception:  # each library of protocol buffers has its own
            lost.append(span)
            continue
        values += [
            Value(each.tag, event.step, event.wall_time, _content(each.tensor))
            for each in event.summary.value
        ]
    return values, sorted(lost)


def _content(tensor: Any) -> Any:
    """An array of float32, or bytes; None for what a log has not."""
    shape = [each.size for each in tensor.tensor_shape.dim]
    if tensor.dtype == _STRING and len(tensor.string_val) == 1 and not shape:
        return tensor.string_val[0]
    if tensor.dtype != _FLOAT:
        return None
    raw = tensor.tensor_content or np.array(tensor.float_val, "<f4").tobytes()
    # a tensor may claim a shape of which it has only one value
    if len(raw) != 4 * math.prod(shape) or min(shape, default=0) < 0 or len(shape) > _MOST_AXES:
        return None
    return np.frombuffer(raw, "<f4").reshape(shape)


def _damage(path: str, lost: list[Span], size: int) -> Iterator[str]:
    torn = sum(end - begin for begin, end in lost if end == size)
    damaged = sum(end - begin for begin, end in lost) - torn
    if damaged:
        yield (
            f"{damaged} bytes of {path} are damaged and were left out, the first at byte "
            f"{lost[0][0]}."
        )
    if torn:
        yield (
            f"The last {torn} bytes of {path} are no whole record and were left out: torn, or "
            "still being written."
        )


def _in_order(newest_first: list[list[Value]]) -> Iterator[Value]:
    """Values whose times never go back, whatever the clocks of the writers said."""
    latest = 0.0
    for each in itertools.chain.from_iterable(reversed(newest_first)):
        if has_time(each):
            latest = max(latest, each.time)
            yield dataclasses.replace(each, time=latest)
        else:
            yield each
