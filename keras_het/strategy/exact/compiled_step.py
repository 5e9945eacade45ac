"""Check of whether XLA can compile a step."""

from __future__ import annotations

import keras

from keras_het.training_strategy import TrainingStrategy


def check_can_compile(strategy: TrainingStrategy, model: keras.Model | None) -> None:
    """Refuse a model whose step XLA is asked to compile but cannot."""
    if model is None or not model.jit_compile:
        return
    extended = strategy.extended
    is_gpu = "GPU" in extended.worker_devices[0]
    # whether a step traced now sums on the machines' CPUs
    has_summation = extended.summation is not None and not extended.reduces_within_worker
    if is_gpu and len(strategy.layout.local_replicas) == 1 and not has_summation:
        return
    raise ValueError(
        "XLA cannot compile a step that runs on several local replicas, or that exchanges values "
        "between CPUs, as summation does. Received: a model with jit_compile=True under "
        f"{strategy.num_replicas_in_sync} replicas on {extended.worker_devices}, with "
        f"aggregation={'summation' if has_summation else 'all_reduce'!r}. Leave jit_compile out of "
        "model.compile(), or give it False; one GPU for each worker can compile with "
        "aggregation='all_reduce'."
    )
