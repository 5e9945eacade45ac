"""Elastic averaging: workers and center pull each other like springs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number
from keras_het.rules.update_rule import (
    AllReduceSum,
    PushMeta,
    Slots,
    State,
    StepsItself,
    SynchronousRule,
    Update,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


BETA = 0.9
"""Sum of the moving rates of all workers that the authors of EASGD use."""
LARGEST_DEFAULT = 0.5
"""Moving rate of a single worker, within the bound of 2 / 3 for any number of steps per answer."""


def default_moving_rate(
    alpha: float | None, num_workers: int | None, largest: float = BETA
) -> float:
    """Return the given moving rate, or 0.9 / number of workers."""
    check_number("num_workers", num_workers, least=1, whole=True, or_none=True)
    check_number("alpha", alpha, above=0, or_none=True)
    if alpha is not None:
        return float(alpha)
    if num_workers is None:
        raise ValueError(
            "Elastic averaging needs a moving rate. Received: neither alpha nor num_workers. Give "
            "alpha, or num_workers for the authors' 0.9 / num_workers."
        )
    return min(BETA / num_workers, largest)


def own_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the user's optimizer: Keras wraps it to scale the loss under mixed_float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)


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

    for n = 1 the authors' bound for round robin. It falls with eta: the largest curvature decides.
    The bound is not lower for a worker that exchanges after its step instead of together with it.
    """
    check_number("learning_rate", learning_rate, least=0, most=2, otherwise=" (for the bound)")
    return (4 - 2 * learning_rate) / (2 + at_once * (2 - learning_rate))


def overlapped_rate(learning_rate: float | None, overlap: float) -> float | None:
    r"""Return the rate of one step equal to all o steps taken while an exchange travels.

    That is :math:`1 - (1 - \eta)^o` for :math:`\eta \le 1`; above, some smaller curvature has the
    rate 1, with which all steps reach the minimum.
    """
    if learning_rate is None or overlap < 2:
        return learning_rate
    return max(learning_rate, 1 - (1 - min(learning_rate, 1.0)) ** overlap)


def check_moving_rate(
    alpha: float, learning_rate: float | None, at_once: int, overlap: float = 0
) -> None:
    """Refuse a moving rate outside the bound."""
    check_number("learning_rate", learning_rate, least=0, or_none=True)
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
    """Refuse a moving rate outside the bound for plain gradient descent without schedule."""
    import keras  # a process that serves has no optimizer to check

    optimizer = own_optimizer(optimizer)
    config = optimizer.get_config() if isinstance(optimizer, keras.optimizers.SGD) else {}
    rate = config.get("learning_rate")
    if isinstance(rate, float) and not config.get("momentum") and 0 <= rate <= 2:
        check_moving_rate(alpha, rate, at_once, overlap)


class ElasticAveraging(StepsItself):
    r"""Common base of asynchronous EASGD and its relatives.

    A worker sends its weights :math:`x_i`; with the old center c, both move by the same difference:

    .. math:: c \leftarrow c + \alpha (x_i - c), \qquad x_i \leftarrow x_i - \alpha (x_i - c).

    The answer is the center before the push, so that the worker moves by the same difference even
    if it took steps in the meantime. Between exchanges it takes steps of its own optimizer.

    Args:
        alpha: moving rate :math:`\alpha = \eta\rho`; None for 0.9 / `num_workers`, as the authors
            do, and 0.5 for one worker.
        learning_rate: :math:`\eta` of the workers, times the largest curvature if known, to check
            the bound; None for the bound of an infinitesimal rate.
        num_workers: number of workers; needed for the default of alpha.

    Raises:
        ValueError: if alpha is outside the stability bound of round-robin EASGD on a quadratic, 0 <
            alpha <= (4 - 2 eta) / (4 - eta), or neither alpha nor `num_workers` is given.

    Reference:
        Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015; You,
        Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017.
    """

    name: ClassVar[str] = "elastic_averaging"
    settings = ("alpha", "learning_rate", "num_workers")
    sends_weights: ClassVar[bool] = True

    def __init__(
        self,
        alpha: float | None = None,
        learning_rate: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        self.alpha = default_moving_rate(alpha, num_workers, LARGEST_DEFAULT)
        self.learning_rate = learning_rate
        self.num_workers = num_workers
        check_moving_rate(self.alpha, learning_rate, 1)

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        return Update(center + self.alpha * (change - center), slots, center)

    def message(self, weights: Vector, seen: Vector) -> Vector:
        return weights

    def receive(self, weights: Vector, sent_weights: Vector, answer: Vector) -> Vector:
        return weights - self.alpha * (sent_weights - answer)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        check_with_optimizer(optimizer, self.alpha, 1)

    def check_overlap(self, optimizer: keras.optimizers.Optimizer, steps: float) -> None:
        """Refuse an alpha outside the bound for answers that arrive `steps` steps later."""
        check_with_optimizer(optimizer, self.alpha, 1, steps)


class AsyncEASGD(ElasticAveraging):
    r"""Elastic averaging of workers that descend the plain gradient, in order of arrival.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The worker computes its gradient while its weights and the center travel.

    Reference:
        You, Buluc and Demmel, SC 2017, equations 1 and 2.
    """

    name: ClassVar[str] = "async_easgd"


class HogwildEASGD(ElasticAveraging):
    r"""Async EASGD in which simultaneous pushes do not wait for each other.

    A push may read a center that another has changed halfway, and lose a part of what another adds.
    Versions may count too few updates: a worker's staleness is a lower bound.

    Reference:
        You, Buluc and Demmel, SC 2017; Recht et al., "Hogwild!", NeurIPS 2011.
    """

    name: ClassVar[str] = "hogwild_easgd"
    is_atomic: ClassVar[bool] = False

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        before = center.copy()
        center += self.alpha * (change - before)
        return Update(center, slots, before)


class AsyncMEASGD(ElasticAveraging):
    r"""Async EASGD of workers that run gradient descent with momentum.

    .. math::
        v_i \leftarrow \mu v_i - \eta\, g_i(x_i), \qquad
        x_i \leftarrow x_i + v_i - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha (x_i - c)

    The center's side is that of Async EASGD; the first equation is `keras.optimizers.SGD` with
    momentum on the worker. With Nesterov's momentum it is the EAMSGD of 2015.

    Reference:
        You, Buluc and Demmel, SC 2017, equations 5 and 6; Zhang, Choromanska and LeCun, NeurIPS
        2015.
    """

    name: ClassVar[str] = "async_measgd"

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuse all optimizers but gradient descent with momentum."""
        import keras

        optimizer = own_optimizer(optimizer)
        if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum > 0:
            return
        raise ValueError(
            "AsyncMEASGD is elastic averaging of workers with momentum: compile the model with "
            "keras.optimizers.SGD(learning_rate, momentum=0.9), or use AsyncEASGD. Received: "
            f"{type(optimizer).__name__}(momentum={getattr(optimizer, 'momentum', None)})."
        )


class RoundRobinEASGD(ElasticAveraging):
    r"""Elastic averaging in which worker i + 1 may not push before worker i has.

    The equations are Async EASGD's; the center takes pushes in the order 0, 1, ..., n - 1,
    0, ... The result does not depend on message speed, but a worker that hangs holds up all
    others: use it as a baseline.

    Args:
        num_workers: n; all of them must take part.
        alpha: see `ElasticAveraging`.
        learning_rate: see `ElasticAveraging`.

    Reference:
        Zhang, Choromanska and LeCun, NeurIPS 2015; baseline of You, Buluc and Demmel, SC 2017.
    """

    name: ClassVar[str] = "round_robin_easgd"
    may_wait: ClassVar[bool] = True
    num_workers: int

    def __init__(
        self, num_workers: int, alpha: float | None = None, learning_rate: float | None = None
    ) -> None:
        check_number("num_workers", num_workers, least=1, whole=True)
        super().__init__(alpha, learning_rate, num_workers)

    def create_slots(self, center: Vector) -> Slots:
        return {"turn": np.zeros((), np.float32), "left": np.zeros(self.num_workers, np.float32)}

    def note_presence(self, slots: Slots, worker: int) -> Slots:
        """Return the state in which a pushing worker gets its turns again.

        If all had left, the turn may lie with a worker that never comes back: it moves on.
        """
        slots = {**slots, "left": _with(slots["left"], worker, 0)}
        holder = self._holder(slots)
        return self.pass_turn(slots, holder) if slots["left"][holder] else slots

    def _holder(self, slots: Slots) -> int:
        return int(slots["turn"]) % self.num_workers  # a saved one may be any number

    def is_turn(self, slots: Slots, worker: int) -> bool:
        return worker == self._holder(slots)

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        return super().update(center, self.pass_turn(slots, meta.worker), change, meta)

    def pass_turn(self, slots: Slots, worker: int) -> Slots:
        """Return the state with the next turn, of the first that has not left, itself last."""
        order = (worker + 1 + np.arange(self.num_workers)) % self.num_workers
        following = order[slots["left"][order].argmin()]
        return {**slots, "turn": np.asarray(following, np.float32)}

    def leave(self, slots: Slots, worker: int) -> Slots:
        slots = {**slots, "left": _with(slots["left"], worker, 1)}
        return self.pass_turn(slots, worker) if self.is_turn(slots, worker) else slots


def _with(vector: Vector, index: int, value: float) -> Vector:
    vector = vector.copy()
    vector[index] = value
    return vector


class SyncEASGD(SynchronousRule):
    r"""Deterministic EASGD: workers and center pull each other at the same time.

    .. math::
        x_i \leftarrow x_i - \eta\, g_i(x_i) - \alpha (x_i - c), \qquad
        c \leftarrow c + \alpha \sum_j (x_j - c)

    where both right-hand sides use the old values. An overlapped exchange (period 1, overlap 1: the
    authors' Sync EASGD3) is exactly this: the gradient is computed at the weights that were sent,
    while they travel. Without overlap the exchange follows the step. The summed quantity is
    :math:`x_j - c`, one packed vector; the sum uses the all-reduce's tree or ring instead of taking
    turns.

    Args:
        num_workers: n.
        alpha: moving rate; None for 0.9 / n, as the authors do.
        learning_rate: learning rate of the workers (times the largest curvature if known), to check
            the bound; None for the bound of an infinitesimal rate.
        period: local steps from one exchange to the next.
        overlap: number of steps taken while an exchange is in flight.

    Raises:
        ValueError: if alpha is outside the stability bound on a quadratic,
            0 < alpha <= (4 - 2 eta) / (2 + n (2 - eta)), see `largest_moving_rate`, where eta is
            the rate of all steps of an overlap together, see `overlapped_rate`; or if a number is
            out of range.

    Reference:
        You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017,
        equations 1 and 2 and Sync EASGD 1 to 3.
    """

    name: ClassVar[str] = "sync_easgd"
    settings = ("num_workers", "alpha", "learning_rate", "period", "overlap")

    def __init__(
        self,
        num_workers: int,
        alpha: float | None = None,
        learning_rate: float | None = None,
        period: int = 1,
        overlap: int = 0,
    ) -> None:
        super().__init__(period, overlap)
        check_number("num_workers", num_workers, least=1, whole=True)
        self.num_workers = num_workers
        self.alpha = default_moving_rate(alpha, num_workers)
        self.learning_rate = learning_rate
        check_moving_rate(self.alpha, learning_rate, num_workers, overlap)

    def initial_state(self, weights: tf.Tensor) -> State:
        return {"center": weights}

    def combine(
        self,
        weights: tf.Tensor,
        state: State,
        samples: float | tf.Tensor,
        all_reduce_sum: AllReduceSum,
    ) -> tuple[tf.Tensor, State]:
        center = state["center"]
        difference = weights - center
        moved = center + self.alpha * all_reduce_sum(difference)
        return weights - self.alpha * difference, {"center": moved}

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        check_with_optimizer(optimizer, self.alpha, self.num_workers, self.overlap)
