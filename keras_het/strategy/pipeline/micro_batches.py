r"""A batch in M consecutive parts, and how much each counts.

Micro-batch m has the rows from :math:`\lfloor Bm/M \rfloor` to :math:`\lfloor B(m+1)/M \rfloor`,
and its weight is its part of all B rows. A batch of fewer rows than micro-batches fills up with
rows that count nothing, because a layer need not accept an empty batch.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter, private_api
from keras_het.loader.order.rows import count_rows, slice_rows
from keras_het.strategy.pipeline.model_units import ModelUnits
from keras_het.value_types import Nest


class MicroBatches:
    """The parts of one batch, in the graph."""

    def __init__(self, batch: Nest, count: int) -> None:
        self.count = count
        self.rows = tf.cast(count_rows(batch), tf.int32)
        self._bounds = [self.rows * m // count for m in range(count + 1)]

    def part(self, number: int, of: Nest) -> Nest:
        """Return the rows of a micro-batch, at least one."""
        begin = self._bounds[number]
        end = tf.maximum(self._bounds[number + 1], begin + 1)
        return slice_rows(of, begin, end - begin)

    def counted(self, number: int, of: Nest) -> Nest:
        """Return those rows of a micro-batch's results that belong to the batch."""
        size = self._bounds[number + 1] - self._bounds[number]
        return tf.nest.map_structure(lambda value: value[:size], of)

    def filled_up(self, number: int, of: tf.Tensor) -> tf.Tensor:
        """Undo `counted` for a gradient: rows that count nothing get zeros."""
        size = self._bounds[number + 1] - self._bounds[number]
        missing = tf.maximum(1 - size, 0)
        return tf.concat([of, tf.zeros(tf.concat([[missing], tf.shape(of)[1:]], 0), of.dtype)], 0)

    def offset(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first row of a micro-batch and the row after its last one that counts."""
        return self._bounds[number], self._bounds[number + 1]

    def sizes(self) -> tf.Tensor:
        bounds = tf.stack(self._bounds)
        return bounds[1:] - bounds[:-1]

    def weight(self, number: int) -> tf.Tensor:
        """Return the micro-batch's part of the batch's rows, float64 scalar."""
        size = self._bounds[number + 1] - self._bounds[number]
        return tf.cast(size, tf.float64) / tf.cast(self.rows, tf.float64)


# Keras's own whose value for a sample depends on the other samples
_COUPLED = ("Circle", "Dice", "Tversky", "circle", "dice", "tversky")


# If the loss is a mean over samples, a micro-batch goes back as soon as it is through; otherwise
# the gradient of the whole batch's loss waits for all.
class LossHead:
    """The loss after a pipeline's last stage."""

    def __init__(
        self, units: ModelUnits, batches: MicroBatches, targets: Nest, sample_weight: Nest
    ) -> None:
        self._units, self._batches = units, batches
        self._targets, self._sample_weight = targets, sample_weight
        self._model = units.model
        has_masks = any(getattr(t, "_keras_mask", None) is not None for t in units.graph.outputs)
        self.is_additive = not has_masks and is_mean_over_samples(self._model)

    def scale(self, value: tf.Tensor) -> tf.Tensor:
        return self._model.optimizer.scale_loss(value)

    def micro_batch_gradients(
        self, number: int, outputs: list[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        targets = self._batches.part(number, self._targets)
        weight = self._sample_weight
        weights = None if weight is None else self._batches.part(number, weight)
        return self._gradients(targets, outputs, weights, self._batches.weight(number))

    def whole_batch_gradients(
        self, outputs: dict[int, list[tf.Tensor]], masks: dict[int, list[tf.Tensor | None]]
    ) -> dict[int, list[tf.Tensor | None]]:
        whole = join(self._batches, outputs, masks)
        found = self._gradients(self._targets, whole, self._sample_weight, None)
        result = {}
        for number in outputs:
            begin, end = self._batches.offset(number)
            result[number] = [
                None if g is None else self._batches.filled_up(number, g[begin:end]) for g in found
            ]
        return result

    def _gradients(
        self, targets: Nest, outputs: list[tf.Tensor], weights: Nest, part: tf.Tensor | None
    ) -> list[tf.Tensor | None]:
        """Return the gradients of a part of the loss; metrics of single outputs do not count it."""
        floats = [value for value in outputs if value.dtype.is_floating]
        compiled = keras_graphs_adapter.compiled_loss(self._model)
        with tf.GradientTape(watch_accessed_variables=False) as tape, keras.StatelessScope():
            tape.watch(floats)
            packed = keras_graphs_adapter.packed_outputs(self._units.graph, outputs)
            loss = None if compiled is None else compiled(targets, packed, weights)
            if loss is None:
                loss = tf.zeros([], keras.config.floatx())
        seed = tf.ones([], loss.dtype) if part is None else tf.cast(part, loss.dtype)
        found = iter(tape.gradient(loss, floats, output_gradients=self.scale(seed)))
        return [next(found) if value.dtype.is_floating else None for value in outputs]


def join(
    batches: MicroBatches,
    outputs: dict[int, list[tf.Tensor]],
    masks: dict[int, list[tf.Tensor | None]],
) -> list[tf.Tensor]:
    """Put the outputs of all micro-batches together, with their masks."""
    numbers = sorted(outputs)
    whole: dict[int, tf.Tensor] = {}  # a model may return one tensor twice
    for i, output in enumerate(outputs[numbers[0]]):
        if id(output) in whole:
            continue
        joined = tf.concat([batches.counted(m, outputs[m][i]) for m in numbers], 0)
        if masks[numbers[0]][i] is not None:
            joined._keras_mask = tf.concat([batches.counted(m, masks[m][i]) for m in numbers], 0)
        whole[id(output)] = joined
    return [whole[id(output)] for output in outputs[numbers[0]]]


def is_mean_over_samples(model: keras.Model) -> bool:
    """Tell whether the compiled loss of a batch is the weighted mean of its parts' losses."""
    losses = keras_graphs_adapter.losses_of(model)
    return bool(losses) and all(
        getattr(loss, "reduction", None) in ("sum_over_batch_size", "mean")
        and private_api.is_of_keras(loss)
        and type(loss).__name__ not in _COUPLED
        and getattr(getattr(loss, "fn", None), "__name__", "") not in _COUPLED
        for loss in losses
    )
