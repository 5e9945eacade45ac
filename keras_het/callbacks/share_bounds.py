"""Bounds of shares in the forms in which users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Bound = int | Sequence[int | None] | Mapping[int, int] | None
"""Samples: for all replicas, for each, for some, or none."""


def each_bound(given: Bound, num_replicas: int, missing: int, most: int) -> list[int]:
    """One bound for each replica.

    Args:
        given: the bounds as they were given.
        num_replicas: number of replicas.
        missing: bound of a replica for which none was given.
        most: largest bound that makes a difference.

    Returns:
        Samples, one number for each replica.

    Raises:
        ValueError: if the bounds do not fit the replicas.
    """
    if isinstance(given, Mapping):
        wrong = [replica for replica in given if replica not in range(num_replicas)]
        if wrong:
            raise ValueError(
                f"Bounds name replicas that do not exist. Received: {dict(given)}. Expected "
                f"replicas from 0 to {num_replicas - 1}."
            )
        bounds = [given.get(replica) for replica in range(num_replicas)]
    elif given is None or isinstance(given, int):
        bounds = [given] * num_replicas
    else:
        bounds = list(given)
    if len(bounds) != num_replicas:
        raise ValueError(
            f"There must be one bound for each of the {num_replicas} replicas. Received: {bounds}."
        )
    return [missing if bound is None else min(int(bound), most) for bound in bounds]
