"""Interface of an update rule, and the sides of a worker that rules share."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


RuleT = TypeVar("RuleT", bound="Rule")
Slots = Mapping[str, Vector]
"""State of a rule for a part of the center, by name."""


class PushMeta(NamedTuple):
    """Metadata of a push.

    Args:
        worker: the worker's number.
        samples: number of samples in the change.
        staleness: number of updates of this part of the center since the worker last saw it.
        version: number of updates of this part of the center so far.
    """

    worker: int
    samples: float
    staleness: int
    version: int = 0


class Update(NamedTuple):
    """What a push makes of a part of the center.

    Args:
        center: the new center, float32 of shape [size].
        slots: the new state.
        answer: to the worker, float32 of shape [size].
    """

    center: Vector
    slots: Slots
    answer: Vector


class Rule:
    """A rule that can be made again from its `settings`, names of its constructor's arguments."""

    name: ClassVar[str]
    uses_gradients: ClassVar[bool] = False
    center_is_weights: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()

    def get_config(self) -> dict[str, Any]:
        """Return the settings as the constructor takes them; plain values."""
        return {name: getattr(self, name) for name in self.settings}

    @classmethod
    def from_config(cls: type[RuleT], config: dict[str, Any]) -> RuleT:
        """Return a rule with these settings."""
        return cls(**config)

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Check that the worker's own optimizer is one for which the rule was published.

        Args:
            optimizer: the Keras optimizer that the model was compiled with.

        Raises:
            ValueError: if it is not; the message names a suitable one.
        """


class UpdateRule(Rule, abc.ABC):
    """Base class of asynchronous rules: a worker's message, a part of the center, and an answer.

    The center is cut into parts (partitions); a rule works element by element, so parts are
    independent. Methods are functions of float32 vectors that do not modify their arguments, except
    `update` of a rule that is not atomic. The server side (`create_slots`, `is_turn`, `update`,
    ...) runs in the center's process, under the part's lock. The worker side is `message`,
    `after_sending` and `receive`:

    1. the worker sends `message(weights, seen)`, where `seen` is the answer of its last exchange
       (initially the center);
    2. it continues with `after_sending(weights, seen)` while the message travels;
    3. `receive` returns the weights after the answer, which becomes `seen`.

    Attributes:
        name: the name in the registry.
        settings: names of the constructor's arguments, each kept as an attribute: what serves the
            center without a script makes the rule again from them.
        is_atomic: whether pushes to a part run one after another, so that none is lost. If not,
            `update` runs without a lock, and writes into the center that it is given.
        may_wait: whether `is_turn` can be false.
        sends_weights: whether messages are weights, not changes. `top_k_ratio` is refused then,
            and the default period of `AsyncWorkers` is a number of steps.
        uses_gradients: whether messages are gradients. The worker must not step by itself then: it
            runs `SGD(learning_rate=1)` from the last answer, over accumulated mean gradients, which
            makes its move equal to the negative gradient.
        center_is_weights: whether a worker's weights are the center after `receive`. If not, they
            are its own, and evaluation and saving must use the center.
    """

    is_atomic: ClassVar[bool] = True
    may_wait: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False

    @property
    def least_period(self) -> int:
        """Least steps of the slowest worker between two exchanges, if `period="auto"` plans."""
        return 1

    def create_slots(self, center: Vector) -> Slots:
        """Return the rule's first state for a partition; it must not change the center.

        Returns:
            Map from name to array: everything that a checkpoint of the part needs besides its
            center and version.
        """
        return {}

    def note_presence(self, slots: Slots, worker: int) -> Slots:
        """Return the state after a push from a worker that may have been considered lost before.

        Called before `is_turn`, only if `may_wait`.
        """
        return slots

    def is_turn(self, slots: Slots, worker: int) -> bool:
        """Whether a worker's push is taken now; otherwise it waits. Called only if `may_wait`."""
        return True

    def leave(self, slots: Slots, worker: int) -> Slots:
        """Return the state after a worker has ended, so that no worker waits for its pushes."""
        return slots

    def pass_turn(self, slots: Slots, worker: int) -> Slots:
        """Return the state after a refused push, so that no worker waits for a better one.

        Called only if `may_wait`, for a push in its turn.
        """
        return slots

    @abc.abstractmethod
    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        """Return what a worker's message, `change`, makes of the center."""

    @abc.abstractmethod
    def message(self, weights: Vector, seen: Vector) -> Vector:
        """Return the worker's message; `seen` is the answer of its last exchange."""

    def message_of_gradient(self, gradient: Vector, seen: Vector) -> Vector:
        """Return the worker's message for a mean gradient, if `uses_gradients`.

        Args:
            gradient: the mean over the worker's steps since its last exchange.
            seen: the answer of its last exchange, at which the gradient was computed.
        """
        return self.message(seen - gradient, seen)

    def for_steps_of(self, fraction: float) -> UpdateRule:
        """Return this rule for a worker whose steps have a fraction of the global batch."""
        return self

    @abc.abstractmethod
    def after_sending(self, weights: Vector, seen: Vector) -> Vector:
        """Return the weights to continue with while the message and the answer travel."""

    @abc.abstractmethod
    def receive(self, weights: Vector, sent_weights: Vector, answer: Vector) -> Vector:
        """Return the worker's weights after the answer.

        Args:
            weights: the worker's current weights; they may have moved since sending.
            sent_weights: the result of `after_sending` for this exchange.
            answer: the result of `update`.
        """

    def after_absence(self, weights: Vector, start: Vector, num_workers: int) -> Vector:
        """Return the weights to send after an outage, which other workers may have had, too.

        Args:
            weights: the worker's weights.
            start: the weights that it sent last, or received if nothing is in flight.
            num_workers: number of workers that exchange with the service.
        """
        return weights


class SendsGradient(UpdateRule):
    """The worker sends a mean gradient, `seen` less its weights, and continues from the center."""

    # Steps taken while the answer travels are discarded: the next gradient is that of the center.

    uses_gradients: ClassVar[bool] = True
    center_is_weights: ClassVar[bool] = True

    def message(self, weights: Vector, seen: Vector) -> Vector:
        return seen - weights

    def message_of_gradient(self, gradient: Vector, seen: Vector) -> Vector:
        """Return the gradient unchanged: taken from weights, small ones would be rounded away."""
        return gradient

    def after_sending(self, weights: Vector, seen: Vector) -> Vector:
        return seen

    def receive(self, weights: Vector, sent_weights: Vector, answer: Vector) -> Vector:
        return answer


class StepsItself(UpdateRule):
    """The worker's own optimizer runs, also while a message travels."""

    def after_sending(self, weights: Vector, seen: Vector) -> Vector:
        return weights


class SendsChange(StepsItself):
    """The worker sends the change of its weights, and keeps what it has moved meanwhile."""

    center_is_weights: ClassVar[bool] = True

    def message(self, weights: Vector, seen: Vector) -> Vector:
        return weights - seen

    def receive(self, weights: Vector, sent_weights: Vector, answer: Vector) -> Vector:
        return answer + (weights - sent_weights)


State: TypeAlias = "dict[str, tf.Tensor]"
AllReduceSum: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"


class SynchronousRule(Rule, abc.ABC):
    """Combination of all workers' weights from one sum over the workers.

    Workers train independently with their own optimizers. After `period` steps each calls `combine`
    with its weights; the only exchanged data is one packed vector, summed over the workers. The
    state (center, outer momentum) is not sent: it stays bit-identical on all workers because each
    computes it from the same sums, provided that `all_reduce_sum` gives all of them the same bits.

    With `overlap` > 0, workers take that many steps while the sum travels; `receive` then merges
    the result of `combine` into the weights at that time, just before the next exchange begins if
    the overlap is the whole period.

    Attributes:
        name: the name in the registry.
        settings: names of the constructor's arguments, each kept as an attribute.
        uses_gradients: always false: workers run their own optimizers.
        center_is_weights: whether a worker's weights are the center after an exchange without
            overlap. Evaluation and saving use "center" of the state in any case.
    """

    def __init__(self, period: int, overlap: int = 0) -> None:
        check_number("period", period, least=1, whole=True)
        check_number("overlap", overlap, least=0, most=period, whole=True)
        self.period = period
        self.overlap = overlap

    def is_due(self, step: int) -> bool:
        """Whether an exchange begins after this many local steps, at least 1."""
        return step > 0 and step % self.period == 0

    @abc.abstractmethod
    def initial_state(self, weights: tf.Tensor) -> State:
        """Return the rule's first state; it forms a checkpoint with the weights.

        Args:
            weights: the same on all workers, float32 vector.

        Returns:
            Map from name to float32 vector. "center" is the one to evaluate and save.
        """

    @abc.abstractmethod
    def combine(
        self,
        weights: tf.Tensor,
        state: State,
        samples: float | tf.Tensor,
        all_reduce_sum: AllReduceSum,
    ) -> tuple[tf.Tensor, State]:
        """Perform one exchange.

        Args:
            weights: this worker's weights, float32 vector.
            state: the state from `initial_state`, or from the last exchange.
            samples: number of samples that this worker used since the last exchange, scalar.
            all_reduce_sum: sums a float32 vector over the workers; called once.

        Returns:
            The weights after the exchange, as if no step had been taken in the meantime, and the
            state.
        """

    def receive(
        self, weights: tf.Tensor, sent_weights: tf.Tensor, combined: tf.Tensor
    ) -> tf.Tensor:
        """Return the weights after an exchange that overlapped with steps.

        Args:
            weights: this worker's current weights.
            sent_weights: the weights passed to `combine`.
            combined: the weights that it returned.
        """
        return weights + (combined - sent_weights)


class Delta(SendsChange):
    r"""Sum of the workers' changes: :math:`c \leftarrow c + s\,\Delta_i`, answered with :math:`c`.

    A worker runs any optimizer on its weights, sends the difference from the weights it last
    received, and continues from the answer. With s = 1 every worker's progress counts in full, as
    in BytePS's asynchronous mode. A worker whose steps have only a fraction f of the global batch
    sends :math:`f \Delta_i`, so that a sample moves the center equally far on every worker.

    Workers that train on alone while the service is lost all start from the same weights; a worker
    therefore keeps 1 / n of that progress (`after_absence`), else the changes would add up.

    Args:
        scale: factor s; 1 / number of workers averages.

    Raises:
        ValueError: if `scale` is not positive.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020; asynchronous mode of its implementation.
    """

    name: ClassVar[str] = "delta"
    settings = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        check_number("scale", scale, above=0)
        self.scale = float(scale)
        self.step_fraction = 1.0

    def for_steps_of(self, fraction: float) -> Delta:
        own = copy.copy(self)
        own.step_fraction = float(fraction)
        return own

    def message(self, weights: Vector, seen: Vector) -> Vector:
        change = super().message(weights, seen)
        return change if self.step_fraction == 1 else self.step_fraction * change

    def after_absence(self, weights: Vector, start: Vector, num_workers: int) -> Vector:
        """Return weights with which the center moves by the average of n such changes."""
        return start + min(1.0, 1.0 / (num_workers * self.scale)) * (weights - start)

    def update(self, center: Vector, slots: Slots, change: Vector, meta: PushMeta) -> Update:
        center = center + (change if self.scale == 1 else self.scale * change)
        return Update(center, slots, center)
