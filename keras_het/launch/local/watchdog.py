"""A program that ends the workers if the launcher dies without a chance to do so.

Its standard input is a pipe from the launcher, which writes `+GROUP` when it starts a process group
and `-GROUP` when that group is gone. If the pipe ends without a goodbye, the launcher was killed.
It runs by its path, with the standard library alone, and therefore starts in milliseconds.
"""

import contextlib
import os
import signal
import sys
from typing import TextIO


def watch(commands: TextIO) -> set[int]:
    groups: set[int] = set()
    for line in commands:
        change, group = line[:1], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main() -> None:
    for group in watch(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
