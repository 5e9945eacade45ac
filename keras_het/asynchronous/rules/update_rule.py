"""What an update rule is: how what a worker sends and the center are combined, on both sides."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from keras_het.planning.roles.local_steps import LocalStepsPlan


class Signal(enum.IntEnum):
    """What a worker tells a rule beside its pushes.

    NOTHING: only asks. LEAVE: it will not push any more. LOSS_REACHED: training has reached the
    loss that the rule waits for.
    """

    NOTHING = 0
    LEAVE = 1
    LOSS_REACHED = 2


class PushMeta(NamedTuple):
    """What comes with a push, in the graph.

    Args:
        client: number of the worker, int32 scalar.
        samples: samples behind the change, float32 scalar.
        staleness: updates of this part of the center since the worker last saw it, float32 scalar.
        version: updates of this part of the center so far, int64 scalar; None where nobody counts.
    """

    client: Any
    samples: Any
    staleness: Any
    version: Any = None


class UpdateRule(abc.ABC):
    """Combines what one worker sends with one part of the center, and the answer with the worker.

    The center is cut into parts (partitions); a rule works element by element, so that parts are
    independent. The server side (`create_slots`, `is_turn`, `update`) runs where the center is, and
    is traced once for all parts of one size: they differ in their variables only. The worker side
    (`message`, `after_sending`, `receive`) are pure functions of float32 tensors, for one vector or
    one variable as well as for a part of it:

    1. the worker sends `message(weights, seen)`, where `seen` is the answer of its last exchange
       (the center at first);
    2. it goes on with `after_sending(weights, seen)` while the message travels;
    3. `receive` gives the weights after the answer, which becomes `seen`.

    Attributes:
        name: name in the registry, part of what client and service must agree on.
        is_atomic: whether pushes to a part run one after the other, so that none is lost.
        may_wait: whether `is_turn` can be false; the service asks only then.
        uses_gradients: whether messages are gradients. The worker must not step by itself then: it
            runs `SGD(learning_rate=1)` from what it has seen, over accumulated mean gradients, so
            that what it moved back by is the gradient.
        center_is_weights: whether a worker's weights are the center after `receive`. If not, they
            are its own, and whoever evaluates or saves must use the center.
        rows_of_workers: names of slots with a row for each worker, of which `update` changes that
            of the worker that pushed only. Other slots are kept whole while it runs, to be put back
            if the center or a slot is not finite afterwards.
    """

    name: ClassVar[str]
    is_atomic: ClassVar[bool] = True
    may_wait: ClassVar[bool] = False
    uses_gradients: ClassVar[bool]
    center_is_weights: ClassVar[bool]
    rows_of_workers: ClassVar[frozenset[str]] = frozenset()

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """State that the rule keeps for a part.

        Args:
            size: elements of the part.

        Returns:
            Name to shape of float32 variables that start at zero.
        """
        del size
        return {}

    def create_slots(self, center: Any) -> dict[str, Any]:
        """Creates the state for a part; called eagerly, once, where the center is.

        Args:
            center: `tf.Variable` of the part, float32 of shape [size].

        Returns:
            Name to `tf.Variable`: all that a checkpoint of the part needs beside its center and
            version.
        """
        return {
            name: tf.Variable(tf.zeros(shape), trainable=False)
            for name, shape in self.slots(int(center.shape[0])).items()
        }

    def note_presence(self, slots: dict[str, Any], client: Any) -> Any:
        """Takes note of a worker that pushes: it may have been given up before.

        Called in the graph, under the part's lock, before `is_turn`, only if `may_wait`.

        Args:
            slots: the variables of `create_slots`.
            client: number of the worker, int32 scalar.

        Returns:
            A tensor that is there when it is done.
        """
        del slots, client
        return tf.constant(True)

    def is_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Whether a push is taken now, bool scalar; else the worker must try again later.

        Called in the graph, under the part's lock, only if `may_wait`; also for a worker that only
        asks, without values and with 0 samples.

        Args:
            slots: the variables of `create_slots`.
            meta: what came with the push.
        """
        del slots, meta
        return tf.constant(True)

    def pass_turn(self, slots: dict[str, Any], meta: PushMeta) -> Any:
        """Takes note of a push in its turn that is refused, so that nobody waits for a better one.

        Called in the graph, under the part's lock, only if `may_wait` and `is_turn`.

        Args:
            slots: the variables of `create_slots`.
            meta: what came with the push.

        Returns:
            A tensor that is there when it is done.
        """
        del slots, meta
        return tf.constant(True)

    @abc.abstractmethod
    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Changes the center; called in the graph.

        Args:
            center: `tf.Variable` of the part, float32 of shape [size].
            slots: the variables of `create_slots`.
            change: what the worker sent, float32 of shape [size].
            meta: what came with it.

        Returns:
            What the worker gets back, float32 of shape [size].
        """

    def norm_after(self, center_norm: Any, change_norm: Any) -> Any:
        """Upper bound of the center's Euclidean norm after `update`, where that changes no slot.

        A rule that knows it spares its service a copy of the center at each push, with which an
        update is undone after which the center would not be finite.

        Args:
            center_norm: norm of the part of the center, float32 scalar.
            change_norm: norm of what the worker sent, float32 scalar.

        Returns:
            The bound; None, whatever the norms are, if nothing is known.
        """
        del center_norm, change_norm
        return None

    @abc.abstractmethod
    def message(self, weights: Any, seen: Any) -> Any:
        """What the worker sends.

        Args:
            weights: the worker's weights.
            seen: the answer of its last exchange.
        """

    def message_of_gradient(self, gradient: Any, seen: Any) -> Any:
        """What the worker sends of a mean gradient, where `uses_gradients`.

        Args:
            gradient: mean over the worker's steps since its last exchange.
            seen: the answer of its last exchange, at which the gradient was computed.
        """
        return self.message(seen - gradient, seen)

    def for_steps_of(self, fraction: float) -> UpdateRule:
        """This rule for a worker whose steps have a part of the global batch.

        Args:
            fraction: the part.
        """
        del fraction
        return self

    @abc.abstractmethod
    def after_sending(self, weights: Any, seen: Any) -> Any:
        """Weights that the worker goes on with while the message and the answer travel.

        Args:
            weights: the worker's weights when it sent.
            seen: the answer of its last exchange.
        """

    @abc.abstractmethod
    def receive(self, weights: Any, sent_weights: Any, answer: Any) -> Any:
        """The worker's weights after the answer.

        Args:
            weights: the worker's weights now; they may have moved since it sent.
            sent_weights: `after_sending` of this exchange.
            answer: what `update` returned.
        """

    def after_absence(self, weights: Any, start: Any, num_workers: int) -> Any:
        """Weights to exchange by after training without the service, as others may have, too.

        Args:
            weights: the worker's weights.
            start: those that it sent last, or got if nothing is under way.
            num_workers: workers that exchange with the service.
        """
        del start, num_workers
        return weights

    def signal(self, slots: dict[str, Any], client: Any, signal: Any) -> Any:
        """Takes note of what a worker says; called in the graph, under the part's lock.

        Args:
            slots: the variables of `create_slots`.
            client: number of the worker, int32 scalar.
            signal: a `Signal`, int32 scalar.

        Returns:
            The stage that training is in, int32 scalar; 0 for rules without stages.
        """
        del slots, client, signal
        return tf.constant(0)

    def local_steps(self, worker: int, stage: int) -> int | None:
        """Local steps of a worker from one exchange to the next, None where the user says.

        Args:
            worker: its number.
            stage: what `signal` gave.
        """
        del worker, stage
        return None

    @property
    def is_measured(self) -> bool:
        """Whether `plan` says local steps and compression, from times that workers measure."""
        return False

    def plan(
        self,
        iteration_seconds: Sequence[float],
        push_seconds: Sequence[float],
        pull_seconds: Sequence[float],
        stage: int,
    ) -> LocalStepsPlan | None:
        """Local steps and compression of every worker, None where nothing is measured.

        Args:
            iteration_seconds: time of one local step of every worker.
            push_seconds: time in which every worker sends all values.
            pull_seconds: time in which every worker receives the center.
            stage: what `signal` gave.
        """
        del iteration_seconds, push_seconds, pull_seconds, stage
        return None

    def compression_ratio(self, worker: int) -> float | None:
        """Part of the values that a worker sends, None where the user says.

        Args:
            worker: its number.
        """
        del worker
        return None

    def is_stage_over(self, loss: float) -> bool:
        """Whether a training with this loss has reached what the rule waits for.

        Args:
            loss: of the worker's training as Keras logs it, its mean over the epoch so far.
        """
        del loss
        return False

    def check_optimizer(self, optimizer: Any) -> None:
        """Checks that the worker's own optimizer is one that the rule was published for.

        Args:
            optimizer: the Keras optimizer that the model was compiled with.

        Raises:
            ValueError: if it is not; the message says which is.
        """
        del optimizer

    def get_config(self) -> dict[str, Any]:
        """The settings, as the constructor takes them; plain values."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UpdateRule:
        """A rule with these settings."""
        return cls(**config)
