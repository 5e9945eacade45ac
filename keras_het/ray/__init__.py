"""Training on Ray: workers are placed, replaced and added while a training goes on."""

from __future__ import annotations

from keras_het.ray.errors import LostTooOftenError, ScriptError
from keras_het.ray.report import Report
from keras_het.ray.trainer import Trainer

__all__ = ["LostTooOftenError", "Report", "ScriptError", "Trainer"]
