"""The whole model on every process, for callbacks, saving and the user."""

from __future__ import annotations

import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.strategy.pipeline.step.pipeline import Pipeline
from keras_het.strategy.pipeline.step.process_group import ProcessGroup


def gather_state(pipeline: Pipeline, group: ProcessGroup) -> None:
    """Copy the weights of each stage, and what the optimizer keeps for them, to all processes.

    Args:
        pipeline: the model in its stages.
        group: the processes; all of them must call it after the same step.
    """
    if pipeline.gather is None:
        pipeline.gather = tf.function(lambda: _gather(pipeline, group), autograph=False)
    pipeline.gather()


def _gather(pipeline: Pipeline, group: ProcessGroup) -> None:
    optimizer = pipeline.units.model.optimizer
    pairs = [] if optimizer is None else keras_graphs_adapter.variables_of_optimizer(optimizer)
    kept = {id(variable): slots for variable, slots in pairs}
    for number, stage in enumerate(pipeline.stages):
        own = [*stage.weights, *stage.state]
        slots = [slot for variable in own for slot in kept.get(id(variable), [])]
        group.share_state([*own, *slots], pipeline.edges.processes_of(number)[0])
