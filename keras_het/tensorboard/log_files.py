"""The event files of a training, read within bounds, whoever opens them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_het.tensorboard.log_content import LogContent, Value, has_time, log_content
from keras_het.tensorboard.records import Span, records

# A log has 20,000 steps one by one: with 200 replicas 80 MB, and 60 MB of hardware.
_MOST_BYTES, _MOST_RECORDS = 2**28, 1_000_000
_MOST_AXES = 4
_FLOAT, _STRING = 1, 7  # of TensorFlow's DataType

Read = Callable[[str, int], bytes]
Parse = Callable[[bytes], Any]


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
    """An array of float32, or bytes; None for what a log has not.

    A tensor may claim a shape of which it has only one value.
    """
    shape = [each.size for each in tensor.tensor_shape.dim]
    if tensor.dtype == _STRING and len(tensor.string_val) == 1 and not shape:
        return tensor.string_val[0]
    if tensor.dtype != _FLOAT:
        return None
    raw = tensor.tensor_content or np.array(tensor.float_val, "<f4").tobytes()
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
