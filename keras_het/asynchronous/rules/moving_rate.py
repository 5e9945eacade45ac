"""Moving rates of elastic averaging: defaults, and the bounds within which they are stable."""

from __future__ import annotations

import math

import keras

BETA = 0.9
"""Sum of the moving rates of all workers that the authors of EASGD use."""
LARGEST_DEFAULT = 0.5
"""Moving rate of a single worker, within the bound of 2 / 3 for any number of steps per answer."""


def default_moving_rate(
    alpha: float | None, num_workers: int | None, largest: float = BETA
) -> float:
    """Return the given moving rate, or 0.9 / number of workers."""
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1. Received: {num_workers}.")
    if alpha is not None:
        return alpha
    if num_workers is None:
        raise ValueError(
            "Elastic averaging needs a moving rate. Received: neither alpha nor num_workers. Give "
            "alpha, or num_workers for the authors' 0.9 / num_workers."
        )
    return min(BETA / num_workers, largest)


def own_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the user's optimizer: Keras wraps it to scale the loss under mixed_float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def plain_learning_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Return the rate of plain gradient descent without schedule; None for other optimizers."""
    optimizer = own_optimizer(optimizer)
    config = optimizer.get_config() if isinstance(optimizer, keras.optimizers.SGD) else {}
    rate = config.get("learning_rate")
    return rate if isinstance(rate, float) and not config.get("momentum") else None


def largest_moving_rate(learning_rate: float, at_once: int = 1) -> float:
    r"""Return the stability bound of EASGD on a quadratic of curvature 1, for 0 <= rate <= 2.

    With n workers that exchange at once (n = 1: in turns), x their mean and d a worker's distance
    from it, a step of gradient and exchange, both from the same old values, is

    .. math::
        \begin{pmatrix} x \\ c \end{pmatrix} \leftarrow
        \begin{pmatrix} 1 - \eta - \alpha & \alpha \\ n \alpha & 1 - n \alpha \end{pmatrix}
        \begin{pmatrix} x \\ c \end{pmatrix}, \qquad d \leftarrow (1 - \eta - \alpha)\, d.

    No eigenvalue is larger than 1 in magnitude (Jury's test: 1 - trace + determinant = n alpha eta,
    so 1 + trace + determinant >= 0 decides) if and only if

    .. math:: 0 \le \alpha \le \frac{4 - 2 \eta}{2 + n (2 - \eta)},

    which for n = 1 is (4 - 2 eta) / (4 - eta), the bound that the authors give for round robin. It
    falls with eta: the largest curvature decides. A worker that exchanges after its step, instead
    of together with it, has a bound that is not lower.
    """
    if not 0 <= learning_rate <= 2:
        raise ValueError(
            f"The bound is known for learning rates from 0 to 2. Received: {learning_rate}."
        )
    return (4 - 2 * learning_rate) / (2 + at_once * (2 - learning_rate))


def overlapped_rate(learning_rate: float | None, overlap: float) -> float | None:
    r"""Return the rate of one step equal to all steps taken while an exchange travels.

    The pull of an exchange that comes back o steps after it was sent is added to all of them: for
    the bound they act as one step of the rate

    .. math:: 1 - (1 - \eta)^o

    for :math:`\eta \le 1`. Above that, some smaller curvature has the rate 1, with which all steps
    reach the minimum.
    """
    if learning_rate is None or overlap < 2:
        return learning_rate
    return max(learning_rate, 1 - (1 - min(learning_rate, 1.0)) ** overlap)


def check_moving_rate(
    alpha: float, learning_rate: float | None, at_once: int, overlap: float = 0
) -> None:
    """Refuse a moving rate outside the bound."""
    rate = overlapped_rate(learning_rate, overlap)
    bound = largest_moving_rate(rate or 0.0, at_once)
    if 0 < alpha <= bound:
        return
    eta = f"{learning_rate}"
    if rate is not None and rate != learning_rate:
        steps = "any number of" if math.isinf(overlap) else f"{overlap}"
        eta = f"{rate:.4g} ({steps} steps of {learning_rate:.6g} while an exchange travels)"
    formula = "(4 - 2 eta) / (4 - eta)" if at_once == 1 else "(4 - 2 eta) / (2 + n (2 - eta))"
    workers = "" if at_once == 1 else f" and n = {at_once}"
    raise ValueError(
        f"alpha must be above 0 and at most {formula} = {bound:.4g} for eta = {eta}"
        f"{workers}, else workers and center swing apart. Received: alpha={alpha}. The authors use "
        "0.9 / number of workers."
    )


def check_with_optimizer(
    optimizer: keras.optimizers.Optimizer, alpha: float, at_once: int, overlap: float = 0
) -> None:
    """Refuse a moving rate outside the bound for the rate of plain gradient descent."""
    rate = plain_learning_rate(optimizer)
    if rate is not None and 0 <= rate <= 2:
        check_moving_rate(alpha, rate, at_once, overlap)
