"""Assignment of files to workers, and shares of a step when workers have their own files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from keras_het.planning.shares import apportion, exact_weights


def assign_files(sizes: Sequence[int], weights: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Assign whole files to workers such that samples are about in proportion to weights.

    Worker w's ideal is `sum(sizes) * weights[w] / sum(weights)` samples. Files go, largest first,
    to the worker farthest below its ideal (ties to the lowest index).

    Bound: with L the samples of the largest file, a worker's samples differ from its ideal by at
    most L. Above: a worker that gets a file was not above its ideal before, because all shortfalls
    sum to at least zero. Below: if a worker were short by more than L at the end, each file would
    have gone to a worker that was also short by more than L and is still short; then all would be
    short of their ideals, which sum to the number of samples.
    """
    if any(size < 0 for size in sizes):
        raise ValueError(f"Sizes of files must be zero or more samples. Received: {list(sizes)}.")
    exact = exact_weights(weights)
    total, weight_sum = sum(sizes), sum(exact)
    missing = [total * weight / weight_sum for weight in exact]
    eligible = [worker for worker, weight in enumerate(exact) if weight]
    assigned: list[list[int]] = [[] for _ in exact]
    for file in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        worker = max(eligible, key=lambda index: (missing[index], -index))
        assigned[worker].append(file)
        missing[worker] -= sizes[file]
    return tuple(tuple(sorted(files)) for files in assigned)


def shares_of_own_samples(
    total: int,
    weights: Sequence[float],
    replicas_per_worker: Sequence[int],
    remaining: Sequence[int],
) -> tuple[int, ...]:
    """Return shares of a step when each worker can use only samples of its own files.

    Shares follow the weights, as far as workers have samples left. A worker whose replicas all have
    weight zero helps only when all others have run out.
    """
    total = min(total, sum(remaining))
    exact = exact_weights(weights)
    ends = itertools.accumulate(replicas_per_worker)
    parts = [exact[end - count : end] for end, count in zip(ends, replicas_per_worker, strict=True)]
    given = [0] * len(parts)
    left = total
    while left:
        open_workers = [worker for worker in range(len(parts)) if given[worker] < remaining[worker]]
        pulls = [sum(parts[worker], Fraction()) for worker in open_workers]
        if not any(pulls):
            pulls = [Fraction(1)] * len(open_workers)
        wanted = apportion(left, pulls)
        for worker, more in zip(open_workers, wanted, strict=True):
            given[worker] += min(more, remaining[worker] - given[worker])
        left = total - sum(given)
    shares: list[int] = []
    for part, samples in zip(parts, given, strict=True):
        shares += apportion(samples, part if any(part) else [1] * len(part))
    return tuple(shares)
