"""Which workers watch which, at a cost per worker that does not grow with the cluster."""

from __future__ import annotations

_MOST = 3


def neighbours(place: int, number: int, most: int = _MOST) -> tuple[int, ...]:
    """Return the workers that one of `number` watches: worker 0, and those behind it in a ring.

    Worker 0 carries the news of any lost worker, so every worker watches it.
    """
    watched = {0, *((place + offset) % number for offset in range(1, most + 1))}
    return tuple(sorted(watched - {place}))
