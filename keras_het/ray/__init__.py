"""Training on Ray: workers are placed, replaced and added while a training continues."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_het.ray.group import MaxFailuresExceededError, TrainFunctionError
    from keras_het.ray.report import ReportCallback
    from keras_het.ray.trainer import KerasTrainer

__keras_het_stability__ = "experimental"
__all__ = ["KerasTrainer", "MaxFailuresExceededError", "ReportCallback", "TrainFunctionError"]

_MODULE_OF = {
    "MaxFailuresExceededError": "group",
    "ReportCallback": "report",
    "TrainFunctionError": "group",
    "KerasTrainer": "trainer",
}


def __getattr__(name: str) -> Any:
    # Ray's own processes import parts of this; TensorFlow would take each of them seconds.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"keras_het.ray.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'keras_het.ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
