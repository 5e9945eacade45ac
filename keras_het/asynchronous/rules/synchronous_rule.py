"""Interface of a synchronous rule: workers exchange every few steps, all at once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from keras_het.asynchronous.rules.update_rule import Rule
from keras_het.planning.argument_checks import check_number

if TYPE_CHECKING:
    import tensorflow as tf

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
    the overlap is the whole period. Fragmented rules exchange a part of the variables at a time,
    each with a separate state.

    Attributes:
        name: the name in the registry.
        uses_gradients: always false: workers run their own optimizers.
        center_is_weights: whether a worker's weights are the center after an exchange without
            overlap. Evaluation and saving use "center" of the state in any case.
    """

    def __init__(self, period: int, overlap: int = 0) -> None:
        check_number("period", period, least=1)
        check_number("overlap", overlap, least=0, most=period)
        self.period = period
        self.overlap = overlap

    def fragments(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Group the variables that are exchanged together.

        Args:
            sizes: number of elements of each variable, in order.

        Returns:
            The numbers of the variables of each fragment; every variable belongs to one.
        """
        return (tuple(range(len(sizes))),)

    def is_due(self, step: int, fragment: int = 0, num_fragments: int = 1) -> bool:
        """Whether an exchange begins after this many local steps.

        Args:
            step: number of local steps done so far, at least 1.
            fragment: index of the fragment, from 0.
            num_fragments: number of fragments; their exchanges are spread evenly over the period.
        """
        return step > 0 and (step - fragment * self.period // num_fragments) % self.period == 0

    @abc.abstractmethod
    def initial_state(self, weights: tf.Tensor) -> State:
        """Return the state of a fragment; state and weights form a checkpoint of the fragment.

        Args:
            weights: weights of the fragment, the same on all workers, float32 vector.

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
        """Perform one exchange of a fragment.

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
