"""Who watches whom, so that many workers cost each of them no more than few."""

from __future__ import annotations

_MOST = 4


def neighbours(place: int, number: int, most: int = _MOST) -> tuple[int, ...]:
    r"""The workers that one of `number` watches, and tells what it has found.

    They lie :math:`n^{i/k}, i = 0 \ldots k-1` places ahead in a ring, so that news reach everybody
    in about :math:`k n^{1/k}` hops, whoever is gone.

    Args:
        place: the worker's place, 0 to `number` - 1.
        number: :math:`n`, number of workers.
        most: :math:`k`, the largest number of neighbours.

    Returns:
        Places of `most` workers at most; all others where these are few.
    """
    if number <= most + 1:
        offsets = set(range(1, number))
    else:
        offsets = {round(number ** (step / most)) for step in range(most)}
    return tuple((place + offset) % number for offset in sorted(offsets))
