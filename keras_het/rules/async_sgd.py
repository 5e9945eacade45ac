"""Asynchronous gradient descent on the center, by any elementwise optimizer of Keras."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_flag, check_number, expect
from keras_het.rules.update_rule import PushMeta, SendsGradient, Slots, Update

if TYPE_CHECKING:
    from keras_het.rules.server_optimizer import Identifier, ServerOptimizer


@dataclasses.dataclass(eq=False)
class AsyncSGD(SendsGradient):
    r"""A step of an optimizer on the center for each incoming gradient.

    With :math:`\tau` updates since the worker last saw the center, :math:`A_i` samples behind its
    mean gradient :math:`g_i` (of its steps, all weighted equally), and v updates so far, the
    gradient counts by the factor

    .. math::
        f_i = \frac{A_i}{A} \; warm(v) \; \frac{1}{\max(1, \tau)}

    of which all parts are optional. With a `learning_rate` this is gradient descent with momentum,
    :math:`u \leftarrow m\,u + f_i g_i,\; c \leftarrow c - \eta u`; with an `optimizer` it is that
    optimizer's step with the rate :math:`f_i \eta(v)`; for Keras's SGD these are the same. Adam,
    AdamW and Adamax take :math:`f_i g_i` into their first moment and :math:`g_i` into what they
    divide by, at the rate :math:`\eta(v)`: a push counts by its own factor for as long as it is
    remembered. Nadam has no such step and is refused with a factor.
    Gradual warm-up starts at the base rate: :math:`k \, warm(v) = 1 + (k - 1) \min(1, v / V)` for
    :math:`k = A_i / A > 1`. With n workers, asynchrony itself acts like a momentum of about 1 -
    1/n, so choose m smaller than for one device.

    Args:
        learning_rate: :math:`\eta`, for gradient descent with `momentum`.
        momentum: m, from 0 to below 1.
        reference_batch_size: A; None for no scaling by samples.
        staleness_damping: whether to divide by the staleness.
        warmup_pushes: V, number of updates over which a rate raised by samples is reached; 0 for
            none.
        optimizer: instead of `learning_rate`, anything that `keras.optimizers.get` accepts, of an
            elementwise kind: SGD, RMSprop, Adam, AdamW, Adamax, Nadam, Adagrad, Adadelta, Ftrl,
            Lion. Schedules of its rate follow the center's count of updates.

    Raises:
        ValueError: if a number is out of range, there is not exactly one of `learning_rate` and
            `optimizer`, the optimizer does not work on parts of a vector, or it is Nadam and
            there is a factor.

    Reference:
        Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI
        2016 (damping); Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear scaling,
        warm-up); Kim et al., Cluster Computing 23, 2020 (asynchronous large mini-batches; how they
        combine the two is not in the part available to us; this combination is ours).
    """

    name: ClassVar[str] = "async_sgd"
    # `optimizer` is not kept as it was given: `get_config` adds it.
    settings = (
        "learning_rate",
        "momentum",
        "reference_batch_size",
        "staleness_damping",
        "warmup_pushes",
    )

    learning_rate: float | None = None
    momentum: float = 0.0
    reference_batch_size: float | None = None
    staleness_damping: bool = False
    warmup_pushes: int = 0
    optimizer: dataclasses.InitVar[Identifier | None] = None

    def __post_init__(self, optimizer: Identifier | None) -> None:
        self._check_ranges(optimizer)
        self._optimizer: ServerOptimizer | None = None
        if optimizer is not None:
            # Only this brings TensorFlow into a process that serves.
            from keras_het.rules.server_optimizer import ServerOptimizer

            has_factor = self.reference_batch_size is not None or self.staleness_damping
            self._optimizer = ServerOptimizer(optimizer, has_factor)

    def _check_ranges(self, optimizer: Identifier | None) -> None:
        if (self.learning_rate is None) == (optimizer is None):
            raise ValueError(
                "AsyncSGD takes either a learning_rate, for gradient descent with momentum, or an "
                f"optimizer. Received: learning_rate={self.learning_rate}, optimizer={optimizer}. "
                'Give one, such as AsyncSGD(learning_rate=0.1) or AsyncSGD(optimizer="adam").'
            )
        momentum, warm_up = self.momentum, self.warmup_pushes
        check_number("learning_rate", self.learning_rate, above=0, or_none=True)
        check_number("momentum", momentum, least=0, below=1)
        expect(
            not (optimizer and momentum), "0 beside an optimizer with its own", momentum=momentum
        )
        check_number("reference_batch_size", self.reference_batch_size, above=0, or_none=True)
        check_number("warmup_pushes", warm_up, least=0, whole=True)
        check_flag("staleness_damping", self.staleness_damping)
        has_scale = self.reference_batch_size is not None
        expect(has_scale or not warm_up, "0 without reference_batch_size", warmup_pushes=warm_up)

    def create_slots(self, center: Vector) -> Slots:
        if self._optimizer:
            return self._optimizer.for_size(len(center)).initial
        return {"momentum": np.zeros_like(center)} if self.momentum else {}

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        factor = self.factor(meta)
        if self._optimizer:
            instance = self._optimizer.for_size(len(center))
            return instance.step(center, slots, change, meta.version, factor)
        change = factor * change
        if self.momentum:
            change = np.float32(self.momentum) * slots["momentum"] + change
            slots = {**slots, "momentum": change}
        center = center - np.float32(self.learning_rate) * change
        return Update(center, slots, center)

    def factor(self, meta: PushMeta) -> np.float32:
        """Give what a push's gradient is scaled by: its samples, warm-up and staleness."""
        one = factor = np.float32(1)
        if self.reference_batch_size is not None:
            factor = np.float32(meta.samples) / np.float32(self.reference_batch_size)
            if self.warmup_pushes and factor > 1:
                part = np.float32(meta.version) / np.float32(self.warmup_pushes)
                factor = one + (factor - one) * min(part, one)
        if self.staleness_damping:
            factor /= np.float32(max(meta.staleness, 1))
        return factor

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "optimizer": self._optimizer and self._optimizer.serialized(),
        }


_EPSILON = 1e-7


@dataclasses.dataclass(eq=False)
class DelayCompensated(SendsGradient):
    r"""DC-ASGD, which adds the gradient's estimated change since the worker saw the center.

    With :math:`w_i` the center at which worker i computed its gradient, elementwise,

    .. math:: c \leftarrow c - \eta\,\bigl(g_i + \lambda\, g_i \odot g_i \odot (c - w_i)\bigr),
              \qquad w_i \leftarrow c.

    With a `decay` this is DC-ASGD-a: :math:`\lambda` becomes
    :math:`\lambda / \sqrt{s_i + 10^{-7}}`, where
    :math:`s_i \leftarrow d\,s_i + (1 - d)\,g_i \odot g_i`. The service keeps the last answer to
    each worker. A worker that has since received the center in another way (it joins or comes back,
    its push was too stale, or an answer was lost) has seen a different version: its first gradient
    is taken without compensation.

    Args:
        learning_rate: :math:`\eta`.
        compensation: :math:`\lambda`, the strength of the correction; 0 for none.
        num_workers: number of workers.
        decay: d of DC-ASGD-a, from 0 to below 1; None for DC-ASGD-c.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
        and the authors' updaters.
    """

    name: ClassVar[str] = "delay_compensated"
    settings = ("learning_rate", "compensation", "num_workers", "decay")

    learning_rate: float
    compensation: float
    num_workers: int
    decay: float | None = None

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("compensation", self.compensation, least=0)
        check_number("num_workers", self.num_workers, least=1, whole=True)
        check_number("decay", self.decay, least=0, below=1, or_none=True)

    def create_slots(self, center: Vector) -> Slots:
        rows = ["seen"] if self.decay is None else ["seen", "mean_square"]
        names = [f"{row}_{worker}" for row in rows for worker in range(self.num_workers)]
        versions = np.zeros(self.num_workers, np.int64)
        return {**dict.fromkeys(names, np.zeros_like(center)), "seen_version": versions}

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        new, worker = dict(slots), meta.worker
        seen_version = meta.version - meta.staleness
        known = 0 < seen_version == slots["seen_version"][worker]
        square = change * change
        strength = np.float32(self.compensation)
        if self.decay is not None:
            mean = np.float32(self.decay) * slots[f"mean_square_{worker}"]
            mean += np.float32(1 - self.decay) * square
            new[f"mean_square_{worker}"] = mean
            strength = strength / np.sqrt(mean + np.float32(_EPSILON))
        moved = center - slots[f"seen_{worker}"] if known else np.float32(0)
        center = center - np.float32(self.learning_rate) * (change + strength * square * moved)
        new[f"seen_{worker}"] = center
        new["seen_version"] = slots["seen_version"].copy()
        new["seen_version"][worker] = meta.version + 1
        return Update(center, new, center)
