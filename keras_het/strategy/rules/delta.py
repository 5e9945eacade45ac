"""The worker's own optimizer works; its weight change is added to the center."""

from __future__ import annotations

from typing import Any

from keras_het.strategy.rules.update_rule import PushMeta


class Delta:
    r"""Adds what workers have moved: :math:`c \leftarrow c + s\,\Delta_i`, and answers :math:`c`.

    A worker runs any optimizer on its weights and sends the difference to those that it last got;
    it goes on from the answer. With s = 1 every worker's progress counts in full, as in BytePS's
    asynchronous mode, which equals an asynchronous parameter server because the center is the sum
    of all changes.

    Args:
        scale: factor s; 1 / number of workers averages.

    Raises:
        ValueError: if `scale` is not positive.

    Reference:
        Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
        Heterogeneous GPU/CPU Clusters", OSDI 2020; asynchronous mode of its implementation.
    """

    name = "delta"
    is_atomic = True

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"scale must be positive. Received: {scale}. 1 adds changes in full.")
        self._scale = scale

    def slots(self, size: int) -> dict[str, tuple[int, ...]]:
        """No state."""
        return {}

    def update(self, center: Any, slots: dict[str, Any], change: Any, meta: PushMeta) -> Any:
        """Adds the change."""
        center.assign_add(change if self._scale == 1 else self._scale * change)
        return center.read_value()
