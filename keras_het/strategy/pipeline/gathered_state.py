"""The whole model on every process, for callbacks, saving and the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.fit.model_strategy import complete
from keras_het.strategy.pipeline.step.pipeline import Pipeline
from keras_het.strategy.pipeline.step.process_group import ProcessGroup


def gather_state(pipeline: Pipeline, group: ProcessGroup) -> None:
    """Copy the weights of each stage, and what the optimizer keeps for them, to all processes."""
    if pipeline.gather is None:
        pipeline.gather = tf.function(lambda: _gather(pipeline, group), autograph=False)
    pipeline.gather()
    pipeline.note_gathered()


def _gather(pipeline: Pipeline, group: ProcessGroup) -> None:
    optimizer = pipeline.optimizer
    is_built = optimizer is not None and optimizer.built
    pairs = keras_graphs_adapter.variables_of_optimizer(optimizer) if is_built else []
    kept = {id(variable): slots for variable, slots in pairs}
    owners = [pipeline.edges.processes_of(number)[0] for number in range(len(pipeline.stages))]
    for owner, stage in zip(owners, pipeline.stages, strict=True):
        own = [*stage.weights, *stage.state]
        slots = [slot for variable in own for slot in kept.get(id(variable), [])]
        group.share_state([*own, *slots], owner)


def install_completion() -> None:
    """Make what saves or returns all weights of a model put it together first; idempotent.

    Within an epoch, a process has fresh weights of its own stages only.
    """
    for owner, name in (
        (keras.Model, "save"),
        (keras.Model, "save_weights"),
        (keras.Model, "export"),
        (keras.Model, "get_weights"),
        (keras.callbacks.BackupAndRestore, "_save_model"),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "completes"):
            setattr(owner, name, _completing(original, name))


def _completing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def complete_first(self: keras.Model | keras.callbacks.Callback, *args: Any, **kw: Any) -> Any:
        complete(self if isinstance(self, keras.Model) else self.model, name)
        return original(self, *args, **kw)

    complete_first.completes = True  # type: ignore[attr-defined]
    return complete_first
