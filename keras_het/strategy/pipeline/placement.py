"""Where a pipeline's variables lie: each device holds those of its own stages."""

from __future__ import annotations

from collections.abc import Container, Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter, private_api
from keras_het.strategy.pipeline.extended import PipelineExtended
from keras_het.strategy.pipeline.step.stage import Stage


def place(
    extended: PipelineExtended,
    stages: Sequence[Stage],
    homes: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
    taken: Container[int] = (),
) -> None:
    """Move the variables of each stage, and what the optimizer keeps for them, to its device.

    Of a stage with several replicas it is the first one's; the others read it in every step.
    """
    pairs = keras_graphs_adapter.variables_of_optimizer(optimizer) if _is_built(optimizer) else []
    kept = {id(variable): slots for variable, slots in pairs}
    for stage, device in zip(stages, homes, strict=True):
        for variable in [*stage.weights, *stage.state]:
            if id(variable) in taken:
                continue
            for each in [variable, *kept.get(id(variable), [])]:
                if not _lies_on(each, device):
                    with extended.variables_on(device):
                        private_api.recreate_variable(each)
    if pairs:
        keras_graphs_adapter.know_variables_again(optimizer)


def _is_built(optimizer: keras.optimizers.Optimizer | None) -> bool:
    return optimizer is not None and bool(optimizer.built)


def _lies_on(variable: keras.Variable, device: str) -> bool:
    found = tf.DeviceSpec.from_string(variable.value.device)
    wanted = tf.DeviceSpec.from_string(f"/device:{device}")
    return (found.device_type, found.device_index) == (wanted.device_type, wanted.device_index)
