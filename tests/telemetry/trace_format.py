"""What the Trace Event Format demands of a file, and Perfetto and Chrome of its events."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "M": {"name", "pid", "tid", "args"},
}
METADATA = {"process_name", "thread_name"}


def check_trace(content):
    """Fail where a trace in the form of an object breaks a rule.

    Args:
        content: the whole file.
    """
    assert content["displayTimeUnit"] in ("ms", "ns")
    processes: set[int] = set()
    threads: set[tuple[int, int]] = set()
    latest: dict[Any, int] = defaultdict(int)
    for event in content["traceEvents"]:
        kind = event["ph"]
        assert event.keys() >= FIELDS[kind], event
        assert isinstance(event["name"], str)
        assert isinstance(event.get("args", {}), dict)
        for number in (event["pid"], event.get("tid", 1)):
            assert type(number) is int and number > 0, event
        if kind == "M":
            assert event["name"] in METADATA
            assert event["args"]["name"]
            threads.add((event["pid"], event["tid"]))
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            continue
        assert event["pid"] in processes, event
        begin = nanoseconds(event["ts"])
        if kind == "X":
            track = event["pid"], event["tid"]
            assert track in threads, event
            end = begin + nanoseconds(event["dur"])
        else:
            track, end = (kind, event["pid"], event["name"] if kind == "C" else ""), begin
        # sorted, and no slice begins before the one before has ended
        assert begin >= latest[track], event
        latest[track] = end
        if kind == "i":
            assert event["s"] in ("g", "p", "t")
        if kind == "C":
            assert event["args"]
            assert all(is_number(value) for value in event["args"].values()), event


def nanoseconds(microseconds):
    """A time as Perfetto keeps it."""
    assert is_number(microseconds) and microseconds >= 0
    return round(microseconds * 1000)


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
