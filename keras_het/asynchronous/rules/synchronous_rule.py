"""What a synchronous update rule is: workers that exchange every few steps, all at once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

State = dict[str, Any]
AllReduceSum = Callable[[Any], Any]


class SynchronousRule(abc.ABC):
    """Combines the weights of all workers from one sum over the workers.

    Workers train on their own with their own optimizers. After `period` steps each calls `combine`
    with its weights; all that is exchanged is one packed vector, summed over the workers. The
    state (center, outer momentum) is not sent: it stays bit-identical on all workers because each
    computes it from the same sums, if `all_reduce_sum` gives all of them the same bits.

    With `overlap` > 0, workers take that many steps while the sum travels; `receive` then merges
    what came of `combine` into the weights of that moment, just before the next exchange begins if
    the overlap is the whole period. Rules that work by fragments exchange a part of the variables
    at a time, each with a state of its own.

    Attributes:
        name: name in the registry.
        uses_gradients: always false: workers run their own optimizers.
        center_is_weights: whether a worker's weights are the center after an exchange without
            overlap. Whoever evaluates or saves uses "center" of the state in any case.
    """

    name: ClassVar[str]
    uses_gradients: ClassVar[bool] = False
    center_is_weights: ClassVar[bool]

    def __init__(self, period: int, overlap: int = 0) -> None:
        if period < 1 or not 0 <= overlap <= period:
            raise ValueError(
                "period must be at least 1 step and overlap from 0 to period. Received: "
                f"period={period}, overlap={overlap}."
            )
        self.period = period
        self.overlap = overlap

    def fragments(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Which variables are exchanged together.

        Args:
            sizes: elements of each variable, in order.

        Returns:
            The numbers of the variables of each fragment; every variable is in one.
        """
        return (tuple(range(len(sizes))),)

    def is_due(self, step: int, fragment: int = 0, num_fragments: int = 1) -> bool:
        """Whether an exchange begins after this many local steps.

        Args:
            step: local steps done so far, at least 1.
            fragment: which one, from 0.
            num_fragments: how many there are; their exchanges are spread evenly over the period.
        """
        return step > 0 and (step - fragment * self.period // num_fragments) % self.period == 0

    @abc.abstractmethod
    def initial_state(self, weights: Any) -> State:
        """State of a fragment; a checkpoint of the fragment is this and the weights.

        Args:
            weights: weights of the fragment, the same on all workers, float32 vector.

        Returns:
            Name to float32 vector. "center" is what to evaluate and save.
        """

    @abc.abstractmethod
    def combine(
        self, weights: Any, state: State, samples: Any, all_reduce_sum: AllReduceSum
    ) -> tuple[Any, State]:
        """One exchange of a fragment.

        Args:
            weights: this worker's, float32 vector.
            state: of `initial_state`, or of the last exchange.
            samples: that this worker used since the last exchange, scalar.
            all_reduce_sum: sums a float32 vector over the workers; called once.

        Returns:
            The weights after the exchange, as if no step had been taken meanwhile, and the state.
        """

    def receive(self, weights: Any, sent_weights: Any, combined: Any) -> Any:
        """The weights after an exchange that was overlapped with steps.

        Args:
            weights: this worker's weights now.
            sent_weights: those that `combine` had.
            combined: those that it returned.
        """
        return weights + (combined - sent_weights)

    def check_optimizer(self, optimizer: Any) -> None:
        """Checks the workers' own optimizer, as `UpdateRule.check_optimizer` does."""
        del optimizer

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """The settings, as the constructor takes them; plain values."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SynchronousRule:
        """A rule with these settings."""
        return cls(**config)
