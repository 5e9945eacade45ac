"""Which global batches of a pass are this worker's, where several groups share one epoch."""

from __future__ import annotations

from typing import Protocol


class Claims(Protocol):
    """Tells, batch by batch in order, which are one's own."""

    @property
    def passes_before(self) -> tuple[bool, ...]:
        """Passes over the data before this one, for each whether it was iterated.

        They decide the order of samples, and are the same on all workers that share the pass.
        """

    @property
    def num_parts(self) -> int:
        """Steps that one of the batches is cut into."""

    def is_known(self, batch: int) -> bool:
        """Whether it is known already whose batch this is.

        Args:
            batch: number of a global batch in the pass, from 0.
        """

    def owns(self, batch: int) -> bool:
        """Whether a batch is one's own; may wait for the answer.

        Args:
            batch: number of a global batch in the pass, from 0; numbers only grow.
        """

    def is_over(self, batch: int) -> bool:
        """Whether this batch and all later ones belong to others.

        Args:
            batch: number of a global batch in the pass.
        """
