"""The contents of a step: the strategy, its exact weights and the cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

__all__ = ["HeterogeneousStrategy"]


def __getattr__(name: str) -> Any:
    # The command line reads the configuration modules next to it without TensorFlow.
    if name == "HeterogeneousStrategy":
        module = importlib.import_module("keras_het.strategy.heterogeneous_strategy")
        return module.HeterogeneousStrategy
    raise AttributeError(f"module 'keras_het.strategy' has no attribute {name!r}")
