"""Reports to Ray Train, for its dashboard, its result folder and Ray Tune."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import keras
import ray.train

from keras_het.fit.model_strategy import heterogeneous_strategy

CHECKPOINT = "model.keras"


class ReportCallback(keras.callbacks.Callback):
    """Reports each epoch's logs to Ray Train, with the model as a checkpoint.

    Args:
        checkpoint: whether to attach the model, saved by the chief as `model.keras`.

    Reference: `ray.train.report`.
    """

    def __init__(self, checkpoint: bool = True) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """ReportCallback; Ray waits until all workers do."""
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        strategy = heterogeneous_strategy(self.model, self)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self._checkpoint:
                strategy._complete(self.model, "ReportCallback")
                if strategy.is_chief:
                    self.model.save(Path(folder) / CHECKPOINT)
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch + 1, **metrics}, checkpoint=checkpoint)
