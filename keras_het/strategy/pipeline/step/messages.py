"""What this process exchanges with others in one step."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from keras_het.strategy.pipeline.step.edges import Edges, Message, Spec
from keras_het.strategy.pipeline.step.model_units import Token
from keras_het.strategy.pipeline.step.transport import CollectiveTransport


class Messages:
    """The messages of one step, in the graph."""

    def __init__(
        self,
        edges: Edges,
        transport: CollectiveTransport | None,
        specs: dict[Token, Spec],
        first_number: int,
    ) -> None:
        self._edges, self._transport, self._specs = edges, transport, specs
        self._first_number = first_number
        self._numbers: dict[Message, tuple[int, int]] = {}
        self.sends: list[tf.Operation] = []

    @property
    def process(self) -> int:
        """Number of this process."""
        return 0 if self._transport is None else self._transport.process

    def receive(
        self, training: bool, is_additive: bool
    ) -> Iterator[tuple[Message, tf.Tensor, tf.Tensor | None]]:
        """Receive all messages of the step; each waits for its sender by itself."""
        if self._transport is None:
            return
        masks, others = dict[Message, tf.Tensor](), dict[Message, tf.Tensor]()
        messages = self._edges.messages(self._specs, training, is_additive)
        for message, source, target, number in messages:
            if source == self.process:
                self._numbers[message] = target, self._first_number + number
            elif target == self.process:
                spec, is_mask = self._specs[message.token], message.kind == "mask"
                rank, dtype = spec.shape.rank, spec.dtype
                if is_mask:
                    rank, dtype = spec.mask_rank or 0, tf.bool
                received = self._transport.receive(rank, dtype, source, self._first_number + number)
                if not is_mask:
                    # layers may need the sizes that are known, as LayerNormalization does
                    received.set_shape(spec.shape)
                (masks if is_mask else others)[message] = received
        for message, value in others.items():
            yield message, value, masks.get(message._replace(kind="mask"))

    def send(self, message: Message, value: tf.Tensor) -> None:
        """Send a tensor, if a process other than this one takes it."""
        if self._transport is not None and message in self._numbers:
            target, number = self._numbers[message]
            with tf.control_dependencies(None):
                self.sends.append(self._transport.send(value, target, number))

    def send_everywhere(
        self, token: Token, number: int, value: tf.Tensor, mask: tf.Tensor | None
    ) -> None:
        """Send a tensor and its mask to the other processes that take it."""
        for process in range(0 if self._transport is None else self._transport.processes):
            self.send(Message("tensor", token, number, process), value)
            if mask is not None:
                self.send(Message("mask", token, number, process), mask)
