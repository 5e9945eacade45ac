"""Formats of a partition's values: in full, at half precision, or only the largest ones."""

from __future__ import annotations

import abc

import tensorflow as tf

from keras_het.rpc.vector import LARGEST_MESSAGE_BYTES, Partitions


class Wire(abc.ABC):
    """A format of messages; client and service use the same one.

    A push loses what the format cannot carry; `encode` returns this part as the residual, which the
    client adds to its next push (error feedback), so nothing is lost permanently. Answers of the
    service are dense, and by default in full.

    Attributes:
        name: name of the format, on which client and service must agree.
        is_exact: whether a message leaves no residual.
        largest_partition: the largest number of elements in a partition whose messages all fit.
    """

    name: str
    is_exact = False
    largest_partition = LARGEST_MESSAGE_BYTES // 4

    @abc.abstractmethod
    def signature(self, size: int) -> list[tf.TensorSpec]:
        """Return the types of a push of `size` elements."""

    @abc.abstractmethod
    def encode(self, values: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Encode float32 values of shape [size] as tensors to send.

        Returns:
            The tensors; and the residual, float32 of shape [size] or a scalar for all elements.
        """

    @abc.abstractmethod
    def decode(self, tensors: list[tf.Tensor], size: int) -> tf.Tensor:
        """Return the float32 values of shape [size] that were sent; the rest is zero."""

    def encode_answer(self, values: tf.Tensor) -> tf.Tensor:
        """Return the float32 vector to send for an answer of the service."""
        return values

    def decode_answer(self, sent: tf.Tensor, size: int) -> tf.Tensor:
        """Return the float32 values of shape [size] of an answer."""
        return sent


class FloatWire(Wire):
    """All values, as floats.

    TensorFlow's messages encode 16-bit floats as integers of variable length, which takes longer
    than float32 and saves little: instead, two of them travel in the bits of one float32.

    Args:
        dtype: "float32", "float16" or "bfloat16". float16 holds values up to 65,504.

    Raises:
        ValueError: for another type.
    """

    def __init__(self, dtype: str = "float32") -> None:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(
                f"dtype must be 'float32', 'float16' or 'bfloat16'. Received: {dtype!r}."
            )
        self.name, self._dtype = dtype, tf.as_dtype(dtype)
        self.is_exact = dtype == "float32"

    def signature(self, size: int) -> list[tf.TensorSpec]:
        """Return the type of one vector."""
        return [tf.TensorSpec([size if self.is_exact else (size + 1) // 2], tf.float32)]

    def encode(self, values: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Round the values."""
        if self.is_exact:
            return [values], tf.constant(0.0)  # of any shape: a vector would take memory
        rounded = tf.cast(values, self._dtype)
        return [_in_pairs(rounded)], values - tf.cast(rounded, tf.float32)

    def decode(self, tensors: list[tf.Tensor], size: int) -> tf.Tensor:
        """Widen the values."""
        return self.decode_answer(tensors[0], size)

    def encode_answer(self, values: tf.Tensor) -> tf.Tensor:
        """Round the values."""
        return values if self.is_exact else _in_pairs(tf.cast(values, self._dtype))

    def decode_answer(self, sent: tf.Tensor, size: int) -> tf.Tensor:
        """Widen the values."""
        if self.is_exact:
            return sent
        return tf.cast(tf.reshape(tf.bitcast(sent, self._dtype), [-1])[:size], tf.float32)


class TopKWire(Wire):
    """The values of largest magnitude, with their positions.

    Args:
        ratio: fraction of the values to send, above 0 and at most 1; at least one value is sent.

    Raises:
        ValueError: if the ratio is out of range.

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def __init__(self, ratio: float) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1. Received: {ratio}.")
        self.name, self._ratio = f"top-{ratio!r}", ratio
        # Sent values take 8 bytes each with position, answers 4 per element.
        self.largest_partition = min(
            self.largest_partition, int(LARGEST_MESSAGE_BYTES // 8 / ratio)
        )

    def count(self, size: int) -> int:
        """Return how many values out of `size` are sent."""
        return max(1, min(size, round(self._ratio * size)))

    def signature(self, size: int) -> list[tf.TensorSpec]:
        """Return the types of values and positions; clients may send different numbers of them."""
        return [tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int32)]

    def encode(self, values: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Select the largest values."""
        _, places = tf.math.top_k(tf.abs(values), self.count(int(values.shape[0])), sorted=False)
        sent = tf.gather(values, places)
        left = tf.tensor_scatter_nd_update(values, places[:, None], tf.zeros_like(sent))
        return [sent, places], left

    def decode(self, tensors: list[tf.Tensor], size: int) -> tf.Tensor:
        """Put the values in their positions; invalid positions make the values not finite."""
        sent, places = tensors
        valid = tf.reduce_all((places >= 0) & (places < size))
        sent = tf.where(valid, sent, tf.fill(tf.shape(sent), float("nan")))
        places = tf.clip_by_value(places, 0, size - 1)
        return tf.scatter_nd(places[:, None], sent, [size])


def _in_pairs(values: tf.Tensor) -> tf.Tensor:
    """Pack 16-bit values in pairs into a float32 vector, with a zero at an odd end."""
    padded = tf.concat([values, tf.zeros([tf.size(values) % 2], values.dtype)], axis=0)
    return tf.bitcast(tf.reshape(padded, [-1, 2]), tf.float32)


def wire_named(name: str) -> Wire:
    """Return the format with a name, as in `Wire.name`."""
    kind, _, ratio = name.partition("-")
    if kind == "top" and ratio:
        return TopKWire(float(ratio))
    return FloatWire(name)


def check_fits(wire: Wire, partitions: Partitions) -> None:
    """Refuse partitions whose messages TensorFlow's RPC would not accept."""
    largest = max(partitions.sizes)
    if largest > wire.largest_partition:
        raise ValueError(
            f"A push of a partition does not fit into a message in the format {wire.name!r}. "
            f"Received: a partition of {largest} elements. Cut smaller ones: "
            f"Partitions(shapes, partition_size={wire.largest_partition})."
        )
