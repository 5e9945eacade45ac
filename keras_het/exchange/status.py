"""What a service of asynchronous workers says of a request that it has understood."""

from __future__ import annotations

import enum


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
