"""Number of replicas of every worker, and the replicas that belong to this worker."""

from __future__ import annotations

import dataclasses

from keras_het.planning.shares import Weights, apportion, weight_of_each


@dataclasses.dataclass(frozen=True)
class ReplicaLayout:
    """The replicas of all workers, numbered worker by worker.

    Global replica ids are worker-major: worker 0 has the first
    `replicas_per_worker[0]` ids, worker 1 the next ones, and so on.

    Args:
        replicas_per_worker: number of replicas (at least 1) of every worker.
        worker_index: index of this worker in `replicas_per_worker`.

    Raises:
        ValueError: if there is no worker, a worker has no replica, or the index is out of range.
    """

    replicas_per_worker: tuple[int, ...]
    worker_index: int = 0

    def __post_init__(self) -> None:
        counts = tuple(int(count) for count in self.replicas_per_worker)
        object.__setattr__(self, "replicas_per_worker", counts)
        if not counts or min(counts) < 1:
            raise ValueError(
                "replicas_per_worker must name at least one worker, each with one replica or more. "
                f"Received: {counts}. Leave out workers without a replica."
            )
        if not 0 <= self.worker_index < len(counts):
            raise ValueError(
                f"worker_index must be between 0 and {len(counts) - 1} for {len(counts)} workers. "
                f"Received: {self.worker_index}."
            )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.replicas_per_worker)

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers."""
        return sum(self.replicas_per_worker)

    @property
    def local_replicas(self) -> range:
        """Global ids of the replicas of this worker, ascending and without gaps."""
        return self.replicas_of(self.worker_index)

    def replicas_of(self, worker: int) -> range:
        """Return the global ids of the replicas of one worker.

        Args:
            worker: index of the worker.

        Returns:
            The ids as a range.
        """
        first = sum(self.replicas_per_worker[:worker])
        return range(first, first + self.replicas_per_worker[worker])


def weights_of_replicas(shares: Weights | None, layout: ReplicaLayout) -> tuple[float, ...]:
    """Return the weights of all replicas' shares, equal ones by default."""
    if shares is None:
        return (1.0,) * layout.num_replicas
    weights = weight_of_each("share_weights", shares, layout.num_replicas)
    if len(weights) != layout.num_replicas:
        raise ValueError(
            f"`share_weights` needs one weight per replica. Received: {len(weights)} weights "
            f"{weights}; expected: {layout.num_replicas}, for workers with "
            f"{layout.replicas_per_worker} device(s)."
        )
    apportion(1, weights)
    return weights
