"""Sizes of gradient buckets that are worth a try, and the one with which a step is fastest.

How much a step gains depends on the order in which a backward pass makes gradients, on what a
collective costs, and on how much of a device the communication takes away. Trying tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ONE_SUM = 0
"""The size that stands for all gradients at once."""
LEAST_BYTES = 2**20
NUM_BUCKETS = (3, 12, 48)
"""About as many buckets as a model is cut into at each size."""
LEAST_GAIN = 0.02


def sizes_to_try(num_bytes: int) -> list[int]:
    """Return sizes in bytes for gradients of that many, `ONE_SUM` first, then the larger first."""
    sizes = [
        2 ** int(np.log2(num_bytes / number))
        for number in NUM_BUCKETS
        if num_bytes >= LEAST_BYTES * min(NUM_BUCKETS[0], number)
    ]
    return [ONE_SUM, *sorted({max(size, LEAST_BYTES) for size in sizes}, reverse=True)]


def typical_seconds(seconds: np.ndarray) -> np.ndarray:
    """Return the seconds of a step with each size, as they compare within a round.

    Shares and the load of a machine change between rounds: medians of each size may mislead.

    Args:
        seconds: of a step, with a row for each round and a column for each size, today's first.
    """
    return np.median(seconds[:, 0]) * np.median(seconds / seconds[:, :1], axis=0)


def fastest(sizes: Sequence[int], seconds: np.ndarray) -> int:
    """Return the size with the shortest steps, or the first one if none gains 2 % on it.

    Args:
        sizes: the sizes, that of today first.
        seconds: of a step with each size.
    """
    best = int(np.argmin(seconds))
    return sizes[best] if seconds[best] <= (1 - LEAST_GAIN) * seconds[0] else sizes[0]
