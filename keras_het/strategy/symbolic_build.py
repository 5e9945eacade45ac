"""Building of models from the specs of data that must not be looked at before its first epoch.

Keras draws an element to learn the shapes of a batch, in each `fit` and `evaluate` under a strategy
and in none on one device. Data that is told when its epochs begin and end, or that shuffles then,
would continue from where that look has left it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.value_types import Leaf, Nest


def install_symbolic_build() -> None:
    """Make Keras leave such data alone; idempotent. Other data and strategies are not affected."""
    trainer = private_api.TensorFlowTrainer
    original = trainer._maybe_symbolic_build
    if hasattr(original, "may_leave_data_alone"):
        return

    @functools.wraps(original)
    def build(
        model: keras.Model,
        iterator: private_api.EpochIterator | None = None,
        data_batch: Nest = None,
    ) -> Any:
        data = private_api.distributed_data_of(iterator)
        if isinstance(data, DistributedSteps):
            data.epoch_steps = functools.partial(private_api.epoch_steps_of, weakref.ref(iterator))
            data.set_cardinality(private_api.pass_steps_of(iterator))
            # an iterator that has begun belongs to the validation before, which built the model
            if not data.may_be_looked_at or private_api.has_begun(iterator):
                batch = tf.nest.map_structure(_shape_and_type, data.replica_spec)
                iterator, data_batch = None, batch
        return original(model, iterator=iterator, data_batch=data_batch)

    build.may_leave_data_alone = True  # type: ignore[attr-defined]
    trainer._maybe_symbolic_build = build


def _shape_and_type(spec: Leaf) -> Leaf:
    """Return a spec in the form Keras reads; None if an element has no tensor."""
    return spec if hasattr(spec, "dtype") else None
