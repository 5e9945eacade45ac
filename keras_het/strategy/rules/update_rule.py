"""What an update rule is: how a change that a worker sends and the center are combined."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable


class PushMeta(NamedTuple):
    """What comes with a push, in the graph.

    Args:
        client: number of the worker, int32 scalar.
        samples: samples behind the change, float32 scalar.
        staleness: updates of this part of the center since the worker last saw it, float32 scalar.
    """

    client: Any
    samples: Any
    staleness: Any


@runtime_checkable
class UpdateRule(Protocol):
    """Combines what one worker sends with one part of the center.

    The center is cut into parts (partitions); a rule works element by element, so that parts are
    independent. `update` is traced once for each part and runs where the center is.
    """

    @property
    def name(self) -> str:
        """Name of the rule, part of what client and service must agree on."""

    @property
    def is_atomic(self) -> bool:
        """Whether pushes to a part run one after the other, so that none is lost."""

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """State that the rule keeps for a part.

        Args:
            size: elements of the part.

        Returns:
            Name to shape of float32 variables that start at zero.
        """

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Changes the center; called in the graph.

        Args:
            center: `tf.Variable` of the part, float32 of shape [size].
            slots: the variables of `slots`.
            change: what the worker sent, float32 of shape [size].
            meta: what came with it.

        Returns:
            What the worker gets back, float32 of shape [size].
        """
