r"""Number of samples every worker accumulates for one push, and that push's learning rate.

Asynchronous large mini-batches: a worker pushes the mean gradient of A_i samples. If all workers
push at about the same rate, a push of a slow worker is no staler than one of a fast worker, so A_i
is in proportion to speed; a slow link calls for more samples and fewer pushes.

Kim et al. 2020 publish the idea but not the formulas: everything in this module that is not
credited to another paper is reconstructed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from keras_het.planning.times.time_model import check_not_negative


@dataclasses.dataclass(frozen=True)
class PushPlan:
    """Number of samples every pusher accumulates for one push.

    A pusher is an async worker, or the sync group as a whole.

    Args:
        target_seconds: target time between pushes.
        samples: samples of one push of every pusher, A_i; a multiple of its batch.
        push_seconds: predicted time between two pushes of every pusher.
        age_seconds: predicted time from the pull of the weights to the arrival of the push.
    """

    target_seconds: float
    samples: tuple[int, ...]
    push_seconds: tuple[float, ...]
    age_seconds: tuple[float, ...]

    @property
    def samples_per_second(self) -> tuple[float, ...]:
        """Predicted samples per second of every pusher."""
        return tuple(a / t for a, t in zip(self.samples, self.push_seconds, strict=True))

    @property
    def staleness(self) -> tuple[float, ...]:
        """Mean pushes of the others while one push is computed and sent; n - 1 at equal rates."""
        rates = [1 / seconds for seconds in self.push_seconds]
        everyone = math.fsum(rates)
        return tuple(
            age * (everyone - own) for age, own in zip(self.age_seconds, rates, strict=True)
        )


def accumulated_samples(
    samples_per_second: float,
    batch_samples: int,
    target_seconds: float,
    exchange_seconds: float = 0.0,
    overlapped: bool = True,
) -> int:
    r"""Choose A_i of one worker: whole batches for which a push takes about the target time.

    The time between two pushes of A samples, with speed s and an exchange of e seconds, is

    .. math:: \max(A / s, e) \;\text{(overlapped)} \qquad A / s + e \;\text{(one after the other)}

    Of the two neighboring numbers of batches, the one whose time is closer to the target in ratio
    is chosen. If overlapped, it is at least large enough that the exchange ends before the batches
    are computed: the worker never waits for its link.

    Args:
        samples_per_second: speed of the worker, s.
        batch_samples: samples of one of its steps, at least 1.
        target_seconds: time between pushes to aim at.
        exchange_seconds: time of one push and pull, e.
        overlapped: whether the worker computes while it exchanges.

    Returns:
        Samples of one push, a multiple of `batch_samples`, at least one batch.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a speed, batch or target is not positive, or the exchange time is negative.

    Reference:
        The idea of pushing at a common rate: Kim et al., Cluster Computing 23, 2020; reconstructed.
    """
    _check_positive("samples_per_second", samples_per_second)
    _check_positive("target_seconds", target_seconds)
    check_not_negative("exchange_seconds", exchange_seconds)
    if batch_samples != int(batch_samples) or batch_samples < 1:
        raise ValueError(
            "`batch_samples` must be a whole number of samples, at least 1. "
            f"Received: batch_samples={batch_samples!r}. Give the worker a share of the batch."
        )
    batch_seconds = batch_samples / samples_per_second
    apart = 0.0 if overlapped else exchange_seconds
    fewer = max(1, math.floor((target_seconds - apart) / batch_seconds))
    below, above = fewer * batch_seconds + apart, (fewer + 1) * batch_seconds + apart
    batches = fewer if below * above >= target_seconds**2 else fewer + 1
    if overlapped:
        # 1e-9: a quotient that is whole except for rounding.
        batches = max(batches, math.ceil(exchange_seconds / batch_seconds - 1e-9))
    return batches * int(batch_samples)


def plan_pushes(
    samples_per_second: Sequence[float],
    batch_samples: Sequence[int],
    exchange_seconds: Sequence[float],
    target_seconds: float | None = None,
    overlapped: bool = True,
) -> PushPlan:
    """Choose the samples of one push for all pushers, for about equal push rates.

    Args:
        samples_per_second: speed of every pusher; the sync group is one pusher.
        batch_samples: samples of one step of every pusher; for the sync group, its global batch.
        exchange_seconds: time of one push and pull; 0 if the parameter service is embedded.
        target_seconds: time between pushes; by default the shortest that all can sustain, one batch
            and one exchange of the slowest pusher.
        overlapped: whether pushers compute while they exchange.

    Returns:
        The plan. The time between pushes of a pusher misses the target by at most a factor
        sqrt(1 + 1 / k) for k batches, unless one batch or its exchange alone takes longer.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if the lists differ in length or are empty, or for a number that
            `accumulated_samples` refuses.
    """
    if not len(samples_per_second) == len(batch_samples) == len(exchange_seconds) > 0:
        raise ValueError(
            "Every pusher needs a speed, a batch and a time of exchange. Received: "
            f"{len(samples_per_second)} speeds, {len(batch_samples)} batches and "
            f"{len(exchange_seconds)} times of exchange. Give 0.0 where nothing is exchanged."
        )
    pushers = list(zip(samples_per_second, batch_samples, exchange_seconds, strict=True))
    for speed, _, _ in pushers:
        _check_positive("samples_per_second", speed)
    if target_seconds is None:
        target_seconds = max(_push_seconds(b, s, e, overlapped) for s, b, e in pushers)
    samples = [accumulated_samples(s, b, target_seconds, e, overlapped) for s, b, e in pushers]
    return PushPlan(
        target_seconds=target_seconds,
        samples=tuple(samples),
        push_seconds=tuple(
            _push_seconds(a, s, e, overlapped)
            for a, (s, _, e) in zip(samples, pushers, strict=True)
        ),
        age_seconds=tuple(a / s + e for a, (s, _, e) in zip(samples, pushers, strict=True)),
    )


def _push_seconds(samples: int, speed: float, exchange: float, overlapped: bool) -> float:
    compute = samples / speed
    return max(compute, exchange) if overlapped else compute + exchange


def warm_up(scale: float, version: int, warm_up_pushes: int) -> float:
    r"""Return the fraction of a scaled learning rate that is used during warm-up.

    A learning rate that linear scaling raises to k times its base starts at the base and rises
    linearly over the first V pushes:

    .. math:: k \cdot warm(v) = 1 + (k - 1) \min(1, v / V) \quad (k > 1), \qquad warm = 1 \quad
              (k \le 1)

    Args:
        scale: factor of linear scaling, k.
        version: number of pushes that the center has received, v.
        warm_up_pushes: V; 0 for no warm-up.

    Returns:
        warm(v), between 1 / k and 1.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is negative or not finite, or the scale is 0.

    Reference:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section
        2.2 (gradual warm-up; counted in pushes instead of iterations here).
    """
    _check_positive("scale", scale)
    check_not_negative("version", version)
    check_not_negative("warm_up_pushes", warm_up_pushes)
    if scale <= 1 or version >= warm_up_pushes:
        return 1.0
    return (1.0 + (scale - 1.0) * version / warm_up_pushes) / scale


def learning_rate_factor(
    samples: int,
    reference_samples: int,
    staleness: float = 0.0,
    version: int = 0,
    warm_up_pushes: int = 0,
) -> float:
    r"""Return the factor of the base learning rate with which the center applies a push.

    .. math:: \frac{A_i}{A_{ref}} \cdot warm(v) \cdot \frac{1}{\max(1, \tau)}

    Args:
        samples: samples of the push, A_i.
        reference_samples: samples for which the base learning rate was chosen.
        staleness: versions of the center between the pull and the push, tau.
        version: number of pushes that the center has received, v.
        warm_up_pushes: number of pushes over which a raised learning rate is reached; 0 for none.

    Returns:
        The factor.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if samples are not positive, or another number negative or not finite.

    Reference:
        Linear scaling and warm-up: Goyal et al. 2017. Damping by staleness: Zhang, Gupta, Lian and
        Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016. Their product
        for asynchronous large mini-batches is reconstructed.
    """
    _check_positive("samples", samples)
    _check_positive("reference_samples", reference_samples)
    check_not_negative("staleness", staleness)
    scale = samples / reference_samples
    return scale * warm_up(scale, version, warm_up_pushes) / max(1.0, staleness)


def _check_positive(name: str, value: object) -> None:
    check_not_negative(name, value)
    if not value:
        raise ValueError(
            f"`{name}` must be greater than 0. Received: {name}={value!r}. Measure the worker, or "
            "leave it out."
        )
