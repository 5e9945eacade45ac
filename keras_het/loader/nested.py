"""Types of what passes through a pipeline: structures as `tf.nest` understands them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

Rows: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor | np.ndarray"
"""A part of a batch that has rows."""

Leaf: TypeAlias = "Rows | tf.experimental.Optional | None"
"""A part of a batch, with rows or without."""

Batch: TypeAlias = "Leaf | tuple[Batch, ...] | list[Batch] | Mapping[Any, Batch]"
"""A batch or a single sample, as a dataset yields it."""

Spec: TypeAlias = "tf.TypeSpec | tuple[Spec, ...] | list[Spec] | Mapping[Any, Spec]"
"""The types of the parts of a batch, nested like it, as in `tf.data.Dataset.element_spec`."""

StepInput: TypeAlias = (
    "Leaf | tf.distribute.DistributedValues | tuple[StepInput, ...] | list[StepInput]"
    " | Mapping[Any, StepInput]"
)
"""Input of a training step: a batch, or one whose parts hold a value for each local replica."""
