"""Who watches whom, so that many workers cost each of them no more than few."""

from __future__ import annotations

_MOST = 3


def neighbours(place: int, number: int, most: int = _MOST) -> tuple[int, ...]:
    """The workers that one of `number` watches: worker 0, and those behind it in a ring.

    Worker 0 carries the news of any other one that is lost, so that everybody watches it.

    Args:
        place: the worker's place, 0 to `number` - 1.
        number: number of workers.
        most: the largest number of workers that are watched beside worker 0.

    Returns:
        Places of `most` + 1 workers at most.
    """
    watched = {0, *((place + offset) % number for offset in range(1, most + 1))}
    return tuple(sorted(watched - {place}))
