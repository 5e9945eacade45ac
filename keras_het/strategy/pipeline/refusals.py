"""What cannot be trained in a pipeline, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from keras_het import keras_graphs_adapter, private_api
from keras_het.strategy.batches.gathered_rows import refuse_other_rows
from keras_het.strategy.pipeline.step.model_units import ModelUnits
from keras_het.value_types import Rows

_ELSEWHERE = "train it under keras_het.HeterogeneousStrategy"

REFUSED_CALLBACKS = {
    "BatchBalancer": "it gives micro-batches to devices by their measured speed",
    "HybridAggregation": "async workers train whole models",
    "LocalTraining": "a worker has no whole model to train by itself",
}
"""Callbacks that a pipeline makes no sense of, and why."""


def check_has_no_async_workers(number: int) -> None:
    if number:
        raise ValueError(
            "All workers of a pipeline train together: each has a part of the model. Received: "
            f'a cluster with {number} task(s) in the job "async". Make them tasks of the job '
            '"worker", or train under keras_het.HeterogeneousStrategy.'
        )


def check_can_be_cut(units: ModelUnits) -> None:
    model = units.model
    if method := keras_graphs_adapter.own_step_of(model):
        raise ValueError(
            f"A pipeline replaces Keras's own step, and would not run {method}. Received: "
            f"{type(model).__name__}, which overrides it. Leave the method out, or {_ELSEWHERE}."
        )
    for name, is_set in (
        ("run_eagerly=True", model.run_eagerly),
        ("jit_compile=True", model.jit_compile),
        (f"steps_per_execution={model.steps_per_execution}", model.steps_per_execution != 1),
    ):
        if is_set:
            raise ValueError(
                "A pipeline's step is one graph over several devices, built once. Received: "
                f"model.compile({name}). Leave that argument out"
                + (", or set jit_compile=False." if name.startswith("jit") else ".")
            )
    layers = {id(unit.layer): unit.layer for unit in units.units if unit.layer is not None}
    for layer in layers.values():
        for part in private_api.layers_with_state(layer):
            _check_layer(part)
    refuse_other_rows(
        lambda rows: keras_graphs_adapter.outputs_for(units.graph, rows),
        "A pipeline joins the rows of all micro-batches",
        f"Leave that output out, or {_ELSEWHERE}.",
    )


def check_inputs(inputs: Iterable[Rows | None]) -> None:
    if any(value is None for value in inputs):
        raise ValueError(
            "A pipeline needs a tensor for each input of the model. Received: None for an optional "
            f"one. Build the model without it, or {_ELSEWHERE}."
        )


def _check_layer(layer: keras.layers.Layer) -> None:
    if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
        raise ValueError(
            "A stateful layer continues with the rows of the batch before, which a pipeline cuts "
            f"into micro-batches. Received: {type(layer).__name__} {layer.name!r} with "
            f"stateful=True. Set stateful=False, or {_ELSEWHERE}."
        )
    if getattr(layer, "synchronized", False):
        raise ValueError(
            "Synchronized batch normalization needs all micro-batches at once. Received: "
            f"{type(layer).__name__} {layer.name!r} with synchronized=True. Set it to False (each "
            "micro-batch is then normalized by itself), or use LayerNormalization."
        )
