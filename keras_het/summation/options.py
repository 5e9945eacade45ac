"""User options for the summation of gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal

from keras_het.planning.argument_checks import check_number, expect

SMALLEST_PARTITION_BYTES = 32_768
"""A message costs as much time as many bytes, so smaller ones do not pay."""
LARGEST_PARTITION_BYTES = 4_096_000
"""Larger ones save nothing more, and the first of them is longer under way."""

_PARTITIONS_PER_MACHINE = 32
MEASURED = "measured"


@dataclasses.dataclass(frozen=True)
class Summation:
    """Settings of `HeterogeneousStrategy(gradient_reduction=...)`: CPUs of all machines sum.

    Args:
        link_rates: full-duplex rate of each worker's link, in worker order, in any unit; "measured"
            measures all links when the strategy is made; by default all links are equal.
        spare_link_rates: the same for each spare machine (job `summation`), in the same unit, in
            addition to `link_rates`; by default the workers' mean.
        partition_bytes: largest size of a message in bytes; by default every machine gets about 32
            messages per step, which makes sending and receiving overlap.
        partitions_in_flight: messages in flight at the same time to the machine that sums the most,
            with fewer to those that sum less. More messages hide more of the latency; fewer return
            the front layers earlier.
        timeout_seconds: how long to hear nothing from a machine before asking whether it is alive.

    Raises:
        ValueError: if a rate is not positive, `spare_link_rates` comes without the rates of the
            workers, or another number is out of range.
    """

    link_rates: Sequence[float] | Literal["measured"] | None = None
    spare_link_rates: Sequence[float] | None = None
    partition_bytes: int | None = None
    partitions_in_flight: int = 6
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        given = () if self.link_rates in (None, MEASURED) else self.link_rates
        for name, rates in (("link_rates", given), ("spare_link_rates", self.spare_link_rates)):
            listed = [] if rates is None else rates
            is_right = isinstance(listed, Sequence) and all(map(_is_rate, listed))
            otherwise = f', or "{MEASURED}"' if name == "link_rates" else ""
            expect(is_right, f"a list of positive, finite numbers{otherwise}", **{name: rates})
        if self.spare_link_rates and not given:
            raise ValueError(
                "The spare machines' link rates need the workers' rates beside them. Received: "
                f"spare_link_rates={self.spare_link_rates} with link_rates="
                f"{self.link_rates!r}. Give both in the same unit, or neither if all links are "
                f'equal; link_rates="{MEASURED}" measures both.'
            )
        size, most = self.partition_bytes, LARGEST_PARTITION_BYTES
        check_number("partition_bytes", size, least=4, most=most, whole=True, or_none=True)
        check_number("partitions_in_flight", self.partitions_in_flight, least=1, whole=True)
        check_number("timeout_seconds", self.timeout_seconds, above=0)

    @property
    def _given_rates(self) -> Sequence[float] | None:
        return None if isinstance(self.link_rates, str) else self.link_rates

    def worker_rates(self, num_workers: int) -> tuple[float, ...]:
        """Return one rate for each worker; equal ones if they are to be measured."""
        return _rates("link_rates", self._given_rates, num_workers, "worker")

    def spare_rates(self, num_spare: int) -> tuple[float, ...]:
        """Return one rate for each spare machine; the workers' mean if none are given."""
        rates, given = self.spare_link_rates, self._given_rates
        if rates is None and given:
            rates = (math.fsum(given) / len(given),) * num_spare
        return _rates("spare_link_rates", rates, num_spare, "spare machine")

    def elements_per_message(self, num_elements: int, num_machines: int) -> int:
        """Return the largest number of values in a message, of all that are summed at once."""
        if self.partition_bytes is not None:
            return self.partition_bytes // 4
        wanted = 4 * num_elements // (_PARTITIONS_PER_MACHINE * num_machines)
        return min(max(wanted, SMALLEST_PARTITION_BYTES), LARGEST_PARTITION_BYTES) // 4


def _is_rate(rate: object) -> bool:
    return isinstance(rate, Real) and 0 < float(rate) < math.inf


def _rates(name: str, rates: Sequence[float] | None, count: int, what: str) -> tuple[float, ...]:
    if rates is None:
        return (1.0,) * count
    if len(rates) != count:
        raise ValueError(
            f"`{name}` needs one rate per {what}. Received: {len(rates)} rates {list(rates)}; "
            f"expected: {count}."
        )
    return tuple(float(rate) for rate in rates)


def read_gradient_reduction(gradient_reduction: object) -> Summation | None:
    """Return the summation that "all_reduce", "summation" or a `Summation` asks for, if any."""
    if isinstance(gradient_reduction, Summation):
        return gradient_reduction
    if gradient_reduction == "all_reduce":
        return None
    if gradient_reduction == "summation":
        return Summation()
    raise ValueError(
        "`gradient_reduction` must be 'all_reduce', 'summation' or a keras_het.summation."
        f"Summation with settings. Received: {gradient_reduction!r}."
    )
