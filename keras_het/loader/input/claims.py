"""Which global batches of a pass are this worker's, where several groups share one epoch."""

from __future__ import annotations

import collections
from typing import Protocol

from keras_het.loader.input.data_pass import Element


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

    @property
    def left_over(self) -> collections.deque[Element]:
        """Steps of own batches that are still to be delivered.

        A pass begins with them, and leaves in it what it does not come to: Keras may end its epoch
        in the middle of a batch.
        """

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
