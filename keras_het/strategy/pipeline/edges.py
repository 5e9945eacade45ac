"""Which tensors a step moves between which places, and what this process sends and receives."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_het.planning.pipeline.plan import PipelinePlan
from keras_het.strategy.pipeline.model_units import ModelUnits, Token
from keras_het.strategy.pipeline.process_group import ProcessGroup
from keras_het.strategy.pipeline.stage import Stage

HEAD, COLLECTOR = -1, -2
"""Take the model's outputs as stages do: for the gradient of the loss, and for all else."""


class Place(NamedTuple):
    """A device of a process."""

    process: int
    device: str


class Spec(NamedTuple):
    """What is known of a tensor before the step runs."""

    dtype: tf.DType
    shape: tf.TensorShape
    mask_rank: int | None


class Message(NamedTuple):
    """A tensor that goes from one process to another."""

    kind: str
    token: Token
    micro_batch: int
    reader: int


class Edges:
    """The ways of tensors between stages."""

    def __init__(
        self,
        units: ModelUnits,
        stages: Sequence[Stage],
        plan: PipelinePlan,
        places: Sequence[Place],
    ) -> None:
        self.units, self.stages, self.plan = units, list(stages), plan
        self._places = list(places)
        self.maker = {token: s for s, stage in enumerate(stages) for token in stage.sent}
        self.readers = {
            token: [s for s, stage in enumerate(stages) if s > maker and token in stage.taken]
            for token, maker in self.maker.items()
        }
        self.outputs = [token for token in units.outputs if token in self.maker]
        # where the outputs of all micro-batches come together
        self.collector = self.replica(len(self.stages) - 1, 0)

    def replica(self, stage: int, replica: int) -> Place:
        return self._places[self.plan.stages[stage].devices[replica]]

    def place(self, stage: int, micro_batch: int) -> Place:
        return self.replica(stage, self.plan.stages[stage].routes[micro_batch])

    def homes(self, process: int) -> dict[int, str]:
        """Return the device of the first replica here of each stage, the last stage first."""
        return {
            s: place.device
            for s, stage in reversed(list(enumerate(self.plan.stages)))
            for r in reversed(range(len(stage.devices)))
            if (place := self.replica(s, r)).process == process
        }

    def takers(
        self, token: Token, micro_batch: int, training: bool, is_additive: bool
    ) -> dict[int, Place]:
        """Return where each stage (and `HEAD` and `COLLECTOR`) takes a tensor that a stage made."""
        found = {stage: self.place(stage, micro_batch) for stage in self.readers[token]}
        if token in self.outputs:
            found[COLLECTOR] = self.collector
            if training:
                last = len(self.stages) - 1
                found[HEAD] = self.place(last, micro_batch) if is_additive else self.collector
        return found

    def processes_of(self, stage: int) -> list[int]:
        """Return the processes that hold a stage, that of its first replica first."""
        devices = self.plan.stages[stage].devices
        return list(dict.fromkeys(self._places[device].process for device in devices))

    def messages(
        self, specs: dict[Token, Spec], training: bool, is_additive: bool
    ) -> Iterator[tuple[Message, int, int, int]]:
        """Yield each message of a step with its source, its target and its number between them."""
        # Every process yields the same.
        numbers: dict[tuple[int, int], Iterator[int]] = collections.defaultdict(itertools.count)
        for token in sorted(self.maker):
            for m in range(self.plan.num_micro_batches):
                home = self.place(self.maker[token], m).process
                takers = self.takers(token, m, training, is_additive)
                kinds = ["tensor"] if specs[token].mask_rank is None else ["tensor", "mask"]
                for process in sorted({place.process for place in takers.values()} - {home}):
                    for kind in kinds:
                        number = next(numbers[home, process])
                        yield Message(kind, token, m, process), home, process, number
                for reader in self.answering(token, specs[token].dtype) if training else ():
                    process = takers[reader].process
                    if process != home:
                        number = next(numbers[process, home])
                        yield Message("gradient", token, m, reader), process, home, number

    def answering(self, token: Token, dtype: tf.DType) -> list[int]:
        """Return the stages (and `HEAD`) that a gradient of a tensor comes from."""
        if not dtype.is_floating:
            return []
        return [*self.readers[token], *([HEAD] if token in self.outputs else [])]


class Messages:
    """The messages of one step, in the graph."""

    def __init__(
        self,
        edges: Edges,
        group: ProcessGroup | None,
        specs: dict[Token, Spec],
        first_number: int,
    ) -> None:
        self._edges, self._group, self._specs = edges, group, specs
        self.process = 0 if group is None else group.process
        self._first_number = first_number
        self._numbers: dict[Message, tuple[int, int]] = {}
        self.sends: list[tf.Operation] = []

    def receive(
        self, training: bool, is_additive: bool
    ) -> Iterator[tuple[Message, tf.Tensor, tf.Tensor | None]]:
        """Receive all messages of the step; each waits for its sender by itself."""
        if self._group is None:
            return
        found: dict[Message, tf.Tensor] = {}
        messages = self._edges.messages(self._specs, training, is_additive)
        for message, source, target, number in messages:
            number += self._first_number
            if source == self.process:
                self._numbers[message] = target, number
            elif target == self.process:
                spec = self._specs[message.token]
                if message.kind == "mask":
                    rank = spec.mask_rank or 0
                    found[message] = self._group.receive(rank, tf.bool, source, number)
                else:
                    value = self._group.receive(spec.shape.rank, spec.dtype, source, number)
                    # layers may need the sizes that are known, as LayerNormalization does
                    value.set_shape(spec.shape)
                    found[message] = value
        for message, value in found.items():
            if message.kind != "mask":
                yield message, value, found.get(message._replace(kind="mask"))

    def send(self, message: Message, value: tf.Tensor) -> None:
        """Send a tensor, if a process other than this one takes it."""
        if self._group is not None and message in self._numbers:
            target, number = self._numbers[message]
            with tf.control_dependencies(None):
                self.sends.append(self._group.send(value, target, number))

    def send_everywhere(
        self, token: Token, number: int, value: tf.Tensor, mask: tf.Tensor | None
    ) -> None:
        for process in range(0 if self._group is None else self._group.processes):
            self.send(Message("tensor", token, number, process), value)
            if mask is not None:
                self.send(Message("mask", token, number, process), mask)
