"""Bounds of shares: those that users give, and those that a device's memory has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from keras_het.fit.session import Batches, StepFunction
from keras_het.planning import BalancePolicy, make_policy
from keras_het.planning.argument_checks import expect
from keras_het.planning.shares import MAX_TOTAL
from keras_het.planning.time_model import further_parts
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

FIXED_POLICIES = ("even", "static")

Bound = int | Sequence[int | None] | Mapping[int, int] | None
"""Samples: for all replicas, for each, for some, or none."""


def check_bound(name: str, given: Bound) -> None:
    """Refuse what is not a bound for any number of replicas."""
    bounds: Any = given.values() if isinstance(given, Mapping) else given
    bounds = [given] if isinstance(given, str) or not isinstance(bounds, Iterable) else [*bounds]
    is_right = all(
        each is None
        or (isinstance(each, Integral) and not isinstance(each, bool) and int(each) >= 0)
        for each in bounds
    )
    expected = (
        "a whole number of samples, a list with one for each replica, or a dict from replica to "
        "number"
    )
    expect(is_right and len(bounds) > 0, expected, **{name: given})


def bound_of_each(
    name: str, given: Bound, num_replicas: int, missing: int, most: int = MAX_TOTAL
) -> list[int]:
    """Return one bound for each replica, none above `most`."""
    check_bound(name, given)
    if isinstance(given, Mapping):
        if wrong := [replica for replica in given if replica not in range(num_replicas)]:
            raise ValueError(
                f"{name} names replicas that do not exist. Received: {wrong} in {name}={given!r}. "
                f"Expected replicas from 0 to {num_replicas - 1}."
            )
        bounds = [given.get(replica) for replica in range(num_replicas)]
    elif isinstance(given, Sequence):
        bounds = list(given)
    else:
        bounds = [given] * num_replicas
    if len(bounds) != num_replicas:
        raise ValueError(
            f"There must be one bound for each of the {num_replicas} replicas. Received: "
            f"{name}={given!r}."
        )
    return [missing if bound is None else min(int(bound), most) for bound in bounds]


MicroBatchSize = Bound | Literal["auto"]
"""The same, or "auto" for whole shares until memory is known not to hold them."""


def read_micro_batch_size(given: MicroBatchSize, num_replicas: int) -> list[int] | None:
    """Return the most samples that each replica computes on at a time, None for whole shares."""
    if given is None:
        return None
    expect(
        given == "auto" or not isinstance(given, str),
        '"auto" or numbers of samples',
        micro_batch_size=given,
    )
    bound = MAX_TOTAL if given == "auto" else given
    sizes = bound_of_each("micro_batch_size", bound, num_replicas, MAX_TOTAL)
    if min(sizes) < 1:
        raise ValueError(
            "A micro-batch must have at least one sample. Received: "
            f"micro_batch_size={given!r}. None leaves the share of a replica whole."
        )
    return sizes


def upper_bounds(max_share: Bound, memory: Mapping[int, int], num_replicas: int) -> list[int]:
    """Return the largest share of each replica; `memory` has those that are known to be smaller."""
    upper = bound_of_each("max_share", max_share, num_replicas, MAX_TOTAL)
    return [min(most, memory.get(replica, most)) for replica, most in enumerate(upper)]


def start_policy(
    policy: str | BalancePolicy,
    strategy: HeterogeneousStrategy,
    total: int,
    options: Mapping[str, Any],
    min_share: Bound,
    upper: Sequence[int],
) -> BalancePolicy:
    """Return a policy within the bounds, which begins with the strategy's shares if it measures."""
    num_replicas = len(strategy.share_weights)
    if isinstance(policy, str):
        # A real device without a share computes a row of zeros, which takes as long as one sample:
        # giving it no samples gains nothing. An emulated device then takes no time.
        is_real = strategy.extended.emulated_devices is None and total >= num_replicas
        least = 1 if policy not in FIXED_POLICIES and is_real else 0
        lower = bound_of_each("min_share", min_share, num_replicas, least, total)
        if min_share is None:
            lower = [min(pair) for pair in zip(lower, upper, strict=True)]
        weights = {"weights": strategy.share_weights} if policy == "static" else {}
        sizes = strategy.extended.micro_batch_sizes if policy not in FIXED_POLICIES else None
        if sizes is not None:  # absent without, for the sake of policies that do not know them
            options = {"micro_batch_sizes": sizes, **options}
        options = {**weights, **options, "lower": lower, "upper": upper}
    started = make_policy(policy, num_replicas, total, **options)
    if not isinstance(policy, str):
        _adapt(started, num_replicas, total, upper, strategy.extended.micro_batch_sizes)
    measures = started.name not in FIXED_POLICIES
    if measures and len(set(strategy.share_weights)) > 1:
        started.start_from(strategy.share_weights)
    return started


def _adapt(
    policy: BalancePolicy,
    num_replicas: int,
    total: int,
    upper: Sequence[int],
    micro_batch_sizes: Sequence[int] | None,
) -> None:
    """Bring a policy object to the batch and the bounds of this `fit`."""
    if len(policy.shares) not in (0, num_replicas):
        raise ValueError(
            f"The strategy has {num_replicas} replicas. Received: BatchBalancer(policy) with the "
            f"policy {policy.name!r} for {len(policy.shares)}. Make the policy for "
            "len(strategy.share_weights) replicas."
        )
    if sum(policy.shares) != total:
        policy.set_global_batch_size(total)
    for replica, most in enumerate(upper):
        if most < MAX_TOTAL:
            policy.set_upper(replica, most)
    for replica, size in enumerate(micro_batch_sizes or ()):
        if size < MAX_TOTAL:
            policy.set_micro_batch_size(replica, size)


# TensorFlow cannot continue after one replica of a collective has failed: training starts again,
# and finds the bound.
class MemoryBounds:
    """Most samples that fit a replica's memory, in one small file for each that ran out of it."""

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def read(self) -> dict[int, int]:
        """Return the known bounds: replica to the most samples that it computes on at a time."""
        paths = sorted(self._directory.glob("replica-*.json")) if self._directory else []
        known = [json.loads(path.read_text()) for path in paths]
        return {int(each["replica"]): int(each["max_share"]) for each in known}

    def apply(self, strategy: HeterogeneousStrategy) -> dict[int, int]:
        """Make micro-batches as small as is known; return the known bounds of whole shares."""
        known, sizes = self.read(), strategy.extended.micro_batch_sizes
        if sizes is None:
            return known
        strategy.extended.micro_batch_sizes = [
            min(size, known.get(replica, size)) for replica, size in enumerate(sizes)
        ]
        return {}

    def write(self, replica: int, samples: int) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"replica-{replica}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"replica": replica, "max_share": samples}) + "\n")
        temporary.replace(path)

    def run_step(
        self,
        strategy: HeterogeneousStrategy,
        measured: Sequence[Mapping[str, Any]],
        step: StepFunction,
        batches: Batches,
    ) -> Nest:
        """Note where memory runs out in a step of `fit`; `measured` has shares that fitted."""
        try:
            return step(batches)
        except tf.errors.ResourceExhaustedError as error:
            first, devices = strategy.layout.local_replicas.start, strategy.extended.worker_devices
            shares, sizes = strategy.current_shares, strategy.extended.micro_batch_sizes
            if sizes is not None:
                sizes = strategy.extended.compute_times.sizes_at_a_time(sizes)
            without = replicas_without_memory(str(error), devices, first)
            bounds = {}
            for replica in without:
                most, least = (MAX_TOTAL, 0) if sizes is None else (sizes[replica], 1)
                fits = largest_share_that_fits(replica, shares[replica], measured, most)
                bounds[replica] = max(fits, least)
            for replica, samples in bounds.items():
                self.write(replica, samples)
            name = "max_share" if sizes is None else "micro_batch_size"
            owner = "BatchBalancer" if sizes is None else "HeterogeneousStrategy"
            advice = (
                f"Start all workers again: BatchBalancer remembers {name}={bounds}."
                if self._directory
                else f"Start again with {owner}({name}={bounds}), or with "
                "BatchBalancer(memory_dir=...) to have it remembered."
            )
            raise tf.errors.ResourceExhaustedError(
                error.node_def,
                error.op,
                f"{error.message}\nOut of memory on replica(s) {sorted(bounds)}. {advice}",
            ) from error


def largest_share_that_fits(
    replica: int,
    failed: int,
    measured: Sequence[Mapping[str, Any]],
    micro_batch_size: int = MAX_TOTAL,
) -> int:
    """Most samples that a replica has computed at a time, fewer than in a failed share."""
    # half of those if nothing fitted
    *fitted, too_many = (
        -(-share // (1 + further_parts(share, micro_batch_size)))
        for share in (*(row["shares"][replica] for row in measured), failed)
    )
    return max((most for most in fitted if most < too_many), default=0) or too_many // 2


def replicas_without_memory(message: str, devices: Sequence[str], first: int) -> list[int]:
    named = {match.lower() for match in re.findall(r"device:([A-Za-z]+:\d+)", message)}
    hit = [
        first + index
        for index, device in enumerate(devices)
        if device.rsplit("device:", 1)[-1].lower() in named
    ]
    return hit or [first + index for index in range(len(devices))]
