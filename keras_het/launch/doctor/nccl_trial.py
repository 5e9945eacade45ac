"""The program that makes the strategy of a cluster, whose first sum by NCCL may fail."""

from __future__ import annotations

import os
import sys

from keras_het.strategy.cluster.cluster_config import TF_CONFIG

CONNECT_SECONDS = 60.0


def main() -> None:
    """Read TF_CONFIG, make the strategy, and wait for the other workers."""
    os.environ[TF_CONFIG] = sys.stdin.read()
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

    HeterogeneousStrategy(startup_timeout_seconds=CONNECT_SECONDS).barrier()


if __name__ == "__main__":
    main()
