"""Placement of the summation: the bytes of the gradients that each machine sums."""

# n workers hold a gradient of M bytes; k spare machines hold none, but can sum. A worker that sums
# x bytes sends the other M - x of its own gradient away and returns x summed bytes to n - 1 others;
# a spare machine returns its y to n workers. Links carry M + (n - 2) x or n y, in both directions.
# With k = 0 this is the traffic of a ring all-reduce, with k = n (equal links) that of parameter
# servers.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from keras_het.planning.shares import apportion


@dataclasses.dataclass(frozen=True)
class SummationPlan:
    """The bytes that every machine sums, and the cost of that.

    Machines are numbered workers first, then spare machines.

    Args:
        gradient_bytes: size of one worker's gradients in bytes, M.
        worker_rates: bytes per second and direction of every worker's link.
        spare_rates: the same for every spare machine.
        worker_bytes: bytes summed on every worker.
        spare_bytes: bytes summed on every spare machine; with the workers' they sum to M.
    """

    gradient_bytes: int
    worker_rates: tuple[float, ...]
    spare_rates: tuple[float, ...]
    worker_bytes: tuple[int, ...]
    spare_bytes: tuple[int, ...]

    @property
    def machine_bytes(self) -> tuple[int, ...]:
        """Bytes summed on every machine."""
        return self.worker_bytes + self.spare_bytes

    @property
    def link_bytes(self) -> tuple[int, ...]:
        """Bytes per step that every machine's link carries in each direction."""
        n = len(self.worker_bytes)
        if n == 1:
            # The sums of a single worker stay where they are.
            return (sum(self.spare_bytes), *self.spare_bytes)
        workers = (self.gradient_bytes + (n - 2) * own for own in self.worker_bytes)
        return (*workers, *(n * own for own in self.spare_bytes))

    @property
    def seconds(self) -> float:
        """Predicted time of the most loaded link."""
        rates = self.worker_rates + self.spare_rates
        return max(load / rate for load, rate in zip(self.link_bytes, rates, strict=True))

    @property
    def all_reduce_seconds(self) -> float:
        """Predicted time of a ring all-reduce of the workers, at the slowest worker's rate."""
        n = len(self.worker_rates)
        return 2 * (n - 1) / n * self.gradient_bytes / min(self.worker_rates)

    @property
    def parameter_server_seconds(self) -> float:
        """Predicted time if only the spare machines sum; infinite without any."""
        if not self.spare_rates:
            return math.inf
        servers = len(self.worker_rates) * self.gradient_bytes / math.fsum(self.spare_rates)
        return max(self.gradient_bytes / min(self.worker_rates), servers)

    @property
    def speedup_over_all_reduce(self) -> float:
        """Time of the ring all-reduce over the plan's; (n^2 + kn - 2k) / n^2 on equal links."""
        return self.all_reduce_seconds / self.seconds if self.seconds else 1.0

    @property
    def speedup_over_parameter_servers(self) -> float:
        """Time of the parameter servers over the plan's; infinite without spare machines."""
        return self.parameter_server_seconds / self.seconds if self.seconds else math.inf


def plan_summation(
    gradient_bytes: int, worker_rates: Sequence[float], spare_rates: Sequence[float] = ()
) -> SummationPlan:
    r"""Split the summation such that the most loaded link finishes as early as possible.

    Within t seconds a worker can sum (t B_i - M) / (n - 2) bytes, a spare machine t C_j / n, and no
    worker finishes before M / B_i. Both bounds are linear in t, so the smallest t at which they sum
    to M has a closed form; the paper's is the case of equal rates:

    .. math:: t = \max\left(\frac{M}{\min_i B_i},
              \frac{2(n - 1) M}{\sum_i B_i + \frac{n - 2}{n} \sum_j C_j}\right)

    If the first term decides, there is room left, and every machine gets less in proportion. Two
    workers exchange M bytes wherever these are summed: then spare machines sum as much as their
    links carry in that time, as in the paper's formula, and the workers the rest in proportion to
    rates.

    Args:
        gradient_bytes: size of one worker's gradients in bytes, M.
        worker_rates: full-duplex rate of every worker's link in bytes per second, B_i.
        spare_rates: the same for every spare machine, C_j.

    Returns:
        The plan, in whole bytes; each differs by less than one from the real-valued optimum.

    Raises:
        ValueError: if there is no worker, no byte, or a rate is not positive and finite.

    Reference:
        Jiang et al., OSDI 2020, for equal links. The generalization to unequal rates is
        reconstructed from the traffic above; it is not the authors' text.
    """
    workers, spare = (
        _exact_rates("worker_rates", worker_rates),
        _exact_rates("spare_rates", spare_rates),
    )
    if gradient_bytes != int(gradient_bytes) or gradient_bytes < 1 or not workers:
        raise ValueError(
            "A summation plan needs at least one worker and a whole number of bytes, at least 1. "
            f"Received: gradient_bytes={gradient_bytes!r}, worker_rates={list(worker_rates)}."
        )
    total = int(gradient_bytes)
    shares = apportion(total, _real_shares(Fraction(total), workers, spare))
    return SummationPlan(
        gradient_bytes=total,
        worker_rates=tuple(float(rate) for rate in worker_rates),
        spare_rates=tuple(float(rate) for rate in spare_rates),
        worker_bytes=shares[: len(workers)],
        spare_bytes=shares[len(workers) :],
    )


def _real_shares(total: Fraction, workers: list[Fraction], spare: list[Fraction]) -> list[Fraction]:
    """Return the optimal split up to a common factor; exact, so rounding decides nothing."""
    n = len(workers)
    if n == 1:
        return [Fraction(1)] + [Fraction(0)] * len(spare)
    shortest = total / min(workers)
    if n == 2:
        from_spare = [min(total, shortest * rate / 2) for rate in spare]
        rest = max(total - sum(from_spare), Fraction(0))
        return [rest * rate / sum(workers) for rate in workers] + from_spare
    common = sum(workers) + Fraction(n - 2, n) * sum(spare)
    seconds = max(shortest, 2 * (n - 1) * total / common)
    on_workers = [min(total, (seconds * rate - total) / (n - 2)) for rate in workers]
    return on_workers + [min(total, seconds * rate / n) for rate in spare]


def _exact_rates(name: str, rates: Sequence[float]) -> list[Fraction]:
    for rate in rates:
        if not math.isfinite(rate) or rate <= 0:
            raise ValueError(
                f"Every rate in {name} must be positive and finite, in bytes per second. "
                f"Received: {rate!r} in {list(rates)}. Leave out machines that cannot be reached."
            )
    return [Fraction(float(rate)) for rate in rates]
