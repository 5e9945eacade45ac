"""Which workers watch which, at a cost per worker that does not grow with the cluster."""

from __future__ import annotations

_MOST = 3


def neighbours(place: int, number: int, most: int = _MOST) -> tuple[int, ...]:
    """Return the workers that one of `number` watches: worker 0, and those behind it in a ring.

    Worker 0 carries the news of any lost worker, so every worker watches it.

    Args:
        place: the worker's place, 0 to `number` - 1.
        number: number of workers.
        most: the largest number of workers to watch besides worker 0.

    Returns:
        Places of at most `most` + 1 workers.
    """
    watched = {0, *((place + offset) % number for offset in range(1, most + 1))}
    return tuple(sorted(watched - {place}))
