"""A program that ends the workers if the launcher dies without a chance to do so.

Its standard input is a pipe from the launcher, which writes `+GROUP` when it starts a process group
and `-GROUP` when that group is gone. The end of the pipe is that of the launcher. Linux can end a
process with its parent (PR_SET_PDEATHSIG), but not what that process has started.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
