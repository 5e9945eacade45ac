"""Interface of an update rule, and the sides of a worker that rules share."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_het.planning.roles.local_steps import LocalStepsPlan

RuleT = TypeVar("RuleT", bound="Rule")
Slots = dict[str, tf.Variable]
"""State of a rule for a part of the center, by name."""


class Signal(enum.IntEnum):
    """A worker's message to a rule besides its pushes.

    NOTHING: only asks. LEAVE: it will not push any more. LOSS_REACHED: training has reached the
    loss for which the rule waits.
    """

    NOTHING = 0
    LEAVE = 1
    LOSS_REACHED = 2


class PushMeta(NamedTuple):
    """Metadata of a push, in the graph.

    Args:
        worker: the worker's number, int32 scalar.
        samples: number of samples behind the change, float32 scalar.
        staleness: number of updates of this part of the center since the worker last saw it,
            float32 scalar.
        version: number of updates of this part of the center so far, int64 scalar; None if not
            counted.
    """

    worker: tf.Tensor
    samples: tf.Tensor
    staleness: tf.Tensor
    version: tf.Tensor | None = None


class Rule:
    """A rule that can be created again from its settings.

    Attributes:
        name: the name in the registry, on which all workers must agree.
        uses_gradients: whether workers send gradients in place of weights or their changes.
        center_is_weights: whether a worker's weights are the center after an exchange.
        settings: names of the attributes that its constructor takes as arguments of the same name.
    """

    name: ClassVar[str]
    uses_gradients: ClassVar[bool] = False
    center_is_weights: ClassVar[bool]
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
    """Combination of a worker's message with a part of the center, and the answer with the worker.

    The center is cut into parts (partitions); a rule works element by element, so parts are
    independent. The server side (`create_slots`, `is_turn`, `update`) runs in the center's process
    and is traced once for all parts of one size: they differ only in their variables. The worker
    side (`message`, `after_sending`, `receive`) consists of pure functions of float32 tensors, for
    a vector, a variable or a part of one:

    1. the worker sends `message(weights, seen)`, where `seen` is the answer of its last exchange
       (initially the center);
    2. it continues with `after_sending(weights, seen)` while the message travels;
    3. `receive` returns the weights after the answer, which becomes `seen`.

    The server side takes `center`, the `tf.Variable` of a part, float32 of shape [size]; `slots`,
    the variables of `create_slots`; `meta`, the metadata of the push; and `worker`, the worker's
    number, int32 scalar. It is called in the graph, and under the part's lock if pushes run one
    after another; what is about turns and signals always is.

    Attributes:
        is_atomic: whether pushes to a part run one after another, so that none is lost.
        may_wait: whether `is_turn` can be false; the service calls it only then.
        uses_gradients: whether messages are gradients. The worker must not step by itself then: it
            runs `SGD(learning_rate=1)` from the last answer, over accumulated mean gradients, which
            makes its move equal to the negative gradient.
        center_is_weights: whether a worker's weights are the center after `receive`. If not, they
            are its own, and evaluation and saving must use the center.
        rows_of_workers: names of slots with a row for each worker, in which `update` changes only
            the row of the pushing worker. Other slots are copied in full while it runs and restored
            if the center or a slot is not finite afterwards.
    """

    is_atomic: ClassVar[bool] = True
    may_wait: ClassVar[bool] = False
    rows_of_workers: ClassVar[frozenset[str]] = frozenset()

    @property
    def least_period(self) -> int:
        """Least steps of the slowest worker between two exchanges, if `period="auto"` plans."""
        return 1

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return the state that the rule keeps for a part of some size.

        Returns:
            Map from name to shape of float32 variables that start at zero.
        """
        return {}

    def create_slots(self, center: tf.Variable) -> Slots:
        """Create the state for a part; called eagerly, once, in the center's process.

        Returns:
            Map from name to `tf.Variable`: everything that a checkpoint of the part needs besides
            its center and version.
        """
        return {
            name: tf.Variable(tf.zeros(shape), trainable=False)
            for name, shape in self.slots(int(center.shape[0])).items()
        }

    def note_presence(self, slots: Slots, worker: tf.Tensor) -> tf.Tensor | tf.Variable:
        """Record that a worker pushes: it may have been given up before.

        Called before `is_turn`, only if `may_wait`. Returns a tensor that exists once this is done.
        """
        return tf.constant(True)

    def is_turn(self, slots: Slots, meta: PushMeta) -> tf.Tensor:
        """Whether a push is taken now, bool scalar; otherwise the worker must try again later.

        Called only if `may_wait`; this includes calls for a worker that only asks, without values
        and with 0 samples.
        """
        return tf.constant(True)

    def pass_turn(self, slots: Slots, meta: PushMeta) -> tf.Tensor | tf.Variable:
        """Record a refused push that was in its turn, so that no worker waits for a better one.

        Called only if `may_wait` and `is_turn`. Returns a tensor that exists once this is done.
        """
        return tf.constant(True)

    @abc.abstractmethod
    def update(
        self, center: tf.Variable, slots: Slots, change: tf.Tensor, meta: PushMeta
    ) -> tf.Tensor:
        """Change the center by a worker's message, `change`.

        Returns:
            The answer to the worker, float32 of shape [size].
        """

    def norm_after(
        self, center_norm: float | tf.Tensor, change_norm: float | tf.Tensor
    ) -> float | tf.Tensor | None:
        """Bound the center's Euclidean norm after `update`, for updates that change no slot.

        With such a bound, the service need not copy the center at each push in order to undo an
        update that would leave it not finite.

        Args:
            center_norm: norm of the part of the center, float32 scalar.
            change_norm: norm of the worker's message, float32 scalar.

        Returns:
            The bound; None, whatever the norms are, if nothing is known.
        """
        return None

    @abc.abstractmethod
    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the worker's message; `seen` is the answer of its last exchange."""

    def message_of_gradient(self, gradient: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
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
    def after_sending(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the weights to continue with while the message and the answer travel."""

    @abc.abstractmethod
    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        """Return the worker's weights after the answer.

        Args:
            weights: the worker's current weights; they may have moved since sending.
            sent_weights: the result of `after_sending` for this exchange.
            answer: the result of `update`.
        """

    def after_absence(self, weights: tf.Tensor, start: tf.Tensor, num_workers: int) -> tf.Tensor:
        """Return the weights to exchange after a time without the service, for others perhaps too.

        Args:
            weights: the worker's weights.
            start: the weights that it sent last, or received if nothing is in flight.
            num_workers: number of workers that exchange with the service.
        """
        return weights

    def signal(self, slots: Slots, worker: tf.Tensor, signal: tf.Tensor) -> tf.Tensor:
        """Handle a worker's `Signal`, int32 scalar.

        Returns:
            The stage of training, int32 scalar; 0 for rules without stages.
        """
        return tf.constant(0)

    def local_steps(self, worker: int, stage: int) -> int | None:
        """Return a worker's local steps from one exchange to the next, None if the user decides."""
        return None

    @property
    def is_measured(self) -> bool:
        """Whether `plan` determines local steps and compression from measured times."""
        return False

    def plan(
        self,
        iteration_seconds: Sequence[float],
        push_seconds: Sequence[float],
        pull_seconds: Sequence[float],
        stage: int,
    ) -> LocalStepsPlan | None:
        """Return local steps and compression of every worker, None if nothing is measured.

        Args:
            iteration_seconds: time of one local step of every worker.
            push_seconds: time in which every worker sends all values.
            pull_seconds: time in which every worker receives the center.
            stage: the result of `signal`.
        """
        return None

    def compression_ratio(self, worker: int) -> float | None:
        """Return the fraction of the values that a worker sends, None if the user decides."""
        return None

    def is_stage_over(self, loss: float) -> bool:
        """Whether a training with this loss, Keras's mean over the epoch so far, ends a stage."""
        return False


class SendsGradient(UpdateRule):
    """The worker sends a mean gradient and continues from the center.

    It represents its weights as `seen` less the mean gradient of its steps, during which nothing
    moved. Steps taken while the answer travels are discarded: the next gradient is that of the
    center it received.
    """

    uses_gradients: ClassVar[bool] = True
    center_is_weights: ClassVar[bool] = True

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        return seen - weights

    def message_of_gradient(self, gradient: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the gradient unchanged: taken from weights, small ones would be rounded away."""
        return gradient

    def after_sending(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        return seen

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        return answer


class StepsItself(UpdateRule):
    """The worker's own optimizer runs, also while a message travels."""

    def after_sending(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        return weights


class SendsChange(StepsItself):
    """The worker sends the change of its weights.

    Progress made while the answer travels is kept and becomes part of the next change.
    """

    center_is_weights: ClassVar[bool] = True

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        return weights - seen

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        return answer + (weights - sent_weights)
