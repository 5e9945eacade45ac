"""DiLoCo by fragments of the model, overlapped with training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from keras_het.asynchronous.rules.diloco import DiLoCo


class StreamingDiLoCo(DiLoCo):
    r"""DiLoCo of a part of the variables at a time; nobody waits for the exchange.

    The variables fall into P fragments, of which p exchanges when t = p H / P (mod H): the link is
    used evenly, with peaks of about 1 / P. The outer step is DiLoCo's, on the fragment. It is
    there :math:`\tau` steps later, and merges with what the worker has by then:

    .. math:: x_i \leftarrow \alpha x_i + (1 - \alpha)\, c.

    Args:
        period: local steps H from one exchange of a fragment to its next.
        num_fragments: P, at most `period`; at most as many as there are variables are used.
        learning_rate: outer :math:`\eta`.
        momentum: outer :math:`\mu`, from 0 to below 1.
        overlap: :math:`\tau`, at most the period; the authors advise at most 5.
        mixing: :math:`\alpha`, from 0 (the center replaces the weights) to below 1.

    Raises:
        ValueError: if a number is out of its range.

    Reference:
        Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed
        Free Lunch", 2025, arXiv 2501.18512. Fragments are strided, as theirs, but of single
        variables; theirs are of three transformer layers.
    """

    name: ClassVar[str] = "streaming_diloco"
    # A worker's own steps are mixed in: its weights are near the center, not the center.
    center_is_weights: ClassVar[bool] = False

    def __init__(
        self,
        period: int = 100,
        num_fragments: int = 4,
        learning_rate: float = 0.4,
        momentum: float = 0.9,
        overlap: int = 5,
        mixing: float = 0.5,
    ) -> None:
        super().__init__(period, learning_rate, momentum, overlap)
        if not 1 <= num_fragments <= period or not 0 <= mixing < 1:
            raise ValueError(
                "num_fragments must be from 1 to period and mixing from 0 to below 1. Received: "
                f"num_fragments={num_fragments}, period={period}, mixing={mixing}."
            )
        self.num_fragments = num_fragments
        self.mixing = mixing

    def fragments(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Every P-th variable."""
        count = min(self.num_fragments, len(sizes))
        return tuple(tuple(range(first, len(sizes), count)) for first in range(count))

    def receive(self, weights: Any, sent_weights: Any, combined: Any) -> Any:
        """Mixes the worker's weights of now with the center."""
        del sent_weights
        return self.mixing * weights + (1 - self.mixing) * combined

    def get_config(self) -> dict[str, Any]:
        """The settings."""
        return {
            **super().get_config(),
            "num_fragments": self.num_fragments,
            "mixing": self.mixing,
        }
