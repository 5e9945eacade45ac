"""Names of values to which TensorFlow and Keras give no type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

Nest: TypeAlias = Any
"""What `tf.nest` takes: tensors, or what stands for them, in tuples, lists and dicts, or one."""
Leaf: TypeAlias = Any
"""One leaf of a `Nest`: a tensor of any kind, an array, a variable, a number or None."""
Rows: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
"""One component of a batch or an output; its first dimension counts samples."""
Summand: TypeAlias = "tf.Tensor | tf.IndexedSlices"
"""What collectives sum: a dense tensor, or slices such as the gradient of an embedding."""
EitherVariable: TypeAlias = "keras.Variable | tf.Variable"
"""A variable that Keras knows, or one that only TensorFlow does."""
TensorLike: TypeAlias = "tf.Tensor | tf.Variable | keras.Variable | np.ndarray | float"
"""What `tf.convert_to_tensor` makes a tensor of."""
