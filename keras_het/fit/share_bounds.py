"""Bounds of shares, in the forms that users may give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

Bound = int | Sequence[int | None] | Mapping[int, int] | None
"""Samples: for all replicas, for each, for some, or none."""


def each_bound(given: Bound, num_replicas: int, missing: int, most: int) -> list[int]:
    """Return one bound per replica."""
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


def check_share_bounds(min_share: Bound, max_share: Bound) -> None:
    """Refuse bounds that no replicas can satisfy, before it is known how many there are."""
    low, high = _by_replica("min_share", min_share), _by_replica("max_share", max_share)
    sizes = {len(given) for given in (min_share, max_share) if isinstance(given, Sequence)}
    if len(sizes) > 1:
        raise ValueError(
            "min_share and max_share must name the same number of replicas. Received: min_share="
            f"{min_share!r} and max_share={max_share!r}."
        )

    for replica in [*low, *high]:
        least, most = _of(low, replica), _of(high, replica)
        if least is not None and most is not None and least > most:
            whose = "" if replica is None else f" of replica {replica}"
            raise ValueError(
                f"The smallest share{whose} is larger than the largest. Received: min_share="
                f"{min_share!r} and max_share={max_share!r}. Lower the one or raise the other."
            )
    if not isinstance(max_share, Mapping) and high and set(high.values()) == {0}:
        raise ValueError(
            f"Some replica must be allowed a sample. Received: max_share={max_share!r}."
        )


def num_replicas_named(*settings: object) -> int:
    """Count the replicas for which settings have one number each; 1 if one number fits all."""
    lengths = [len(given) for given in settings if hasattr(given, "__len__")]
    return max([*lengths, 1])


def _by_replica(name: str, given: Bound) -> dict[int | None, int]:
    """Return the given bounds by replica; None stands for every replica."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs: list[tuple[Any, Any]] = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [pair for pair in enumerate(given) if pair[1] is not None]
    else:
        pairs = [(None, given)]
    for key, bound in pairs:
        for number in (bound,) if key is None else (key, bound):
            if isinstance(number, bool) or not isinstance(number, Integral):
                raise TypeError(
                    f"{name} must be a whole number, a list with one for each replica, or a dict "
                    f"from replica to number. Received: {name}={given!r}."
                )
            if number < 0:
                raise ValueError(f"{name} must be at least 0 samples. Received: {name}={given!r}.")
    return {key: int(bound) for key, bound in pairs}


def _of(bounds: dict[int | None, int], replica: int | None) -> int | None:
    return bounds.get(replica, bounds.get(None))
