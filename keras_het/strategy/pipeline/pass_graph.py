"""The forward and backward passes of one step, as this process runs them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_het.planning.pipeline.plan import stage_order
from keras_het.strategy.exact.own_state import StateChange
from keras_het.strategy.pipeline.edges import COLLECTOR, HEAD, Edges, Message, Messages, Place
from keras_het.strategy.pipeline.micro_batches import LossHead, MicroBatches
from keras_het.strategy.pipeline.model_units import Token
from keras_het.strategy.pipeline.pass_times import Emulation, Pass, PassClock
from keras_het.strategy.pipeline.stage import PassResult, Values
from keras_het.value_types import Summand


# A device runs its passes in the order of the schedule; transfers start as soon as they can.
class PassGraph:
    """Builds this process's passes of one step into the graph that is being traced."""

    def __init__(
        self,
        edges: Edges,
        messages: Messages,
        emulation: Emulation | None,
        clock: PassClock | None,
    ) -> None:
        self._units, self._stages, self._plan = edges.units, edges.stages, edges.plan
        self._edges, self._messages, self._process = edges, messages, messages.process
        self._emulation, self._clock = emulation, clock
        self.gradients: dict[int, list[Summand | None]] = {}
        self.losses: list[tf.Tensor] = []
        self.outputs: dict[int, list[tf.Tensor]] = {}
        self.output_masks: dict[int, list[tf.Tensor | None]] = {}

    def run(self, batches: MicroBatches, inputs: list[tf.Tensor], head: LossHead | None) -> None:
        self._batches, self._training = batches, head is not None
        self._is_additive = head is None or head.is_additive
        if head is not None:
            self._loss = head
        self._inputs = [
            dict(zip(self._units.inputs, batches.part(m, inputs), strict=True))
            for m in range(self._plan.num_micro_batches)
        ]
        here = {
            (s, r): place.device
            for s, stage in enumerate(self._plan.stages)
            for r in range(len(stage.devices))
            if (place := self._edges.replica(s, r)).process == self._process
        }
        self.homes = self._edges.homes(self._process)
        # a further replica of a stage has a copy of the weights for the time of the step
        self._weights = {
            (s, device): _read(self._stages[s].weights, device) for (s, _), device in here.items()
        }
        self._state_before = {
            s: _read(self._stages[s].state, home) for s, home in self.homes.items()
        }
        self._results: dict[int, dict[int, PassResult]] = {s: {} for s in self.homes}
        # what is where a stage, the loss or the collector takes it
        self._given: dict[tuple[int, int], Values] = collections.defaultdict(Values)
        # the gradients that came back, by tensor and by the stage that took it
        self._answers: dict[tuple[int, int], dict[tuple[Token, int], tf.Tensor | None]]
        self._answers = collections.defaultdict(dict)
        # forward passes that wait for their backward pass: the tape, and what it watches
        self._pending: dict[tuple[int, int], tuple[tf.GradientTape, dict[Token, tf.Tensor]]] = {}
        self._sums: dict[int, list[list[Summand | None]]] = {s: [] for s in self.homes}
        self._last: dict[tuple[int, int], tf.Operation] = {}
        for message, value, mask in self._messages.receive(self._training, self._is_additive):
            token, number = message.token, message.micro_batch
            if message.kind == "gradient":
                self._answer(token, number, message.reader, value)
            else:
                self._deliver(token, number, value, mask)
        schedule = self._plan.schedule if self._is_additive else "gpipe"
        self._build(
            {
                (s, r): collections.deque(
                    each
                    for each in stage_order(self._plan.stages, s, r, schedule)
                    if self._training or each[0] == "forward"
                )
                for s, r in here
            }
        )
        self.gradients = {s: self._total_gradients(s) for s in self.homes}

    def _build(self, queues: dict[tuple[int, int], collections.deque[tuple[str, int]]]) -> None:
        """Build the passes of all devices, each as soon as what it takes exists."""
        while any(queues.values()):
            if not any([self._advance(place, queue) for place, queue in queues.items()]):
                left = {place: list(queue) for place, queue in queues.items()}
                raise RuntimeError(
                    f"The passes of this plan wait for each other. Received: {left} left over, of "
                    f"the plan\n{self._plan}\nThis is a defect of keras_het; please report it."
                )

    def _advance(self, at: tuple[int, int], queue: collections.deque[tuple[str, int]]) -> bool:
        stage, replica = at
        if not queue or not self._is_ready(stage, *queue[0]):
            return False
        which, device = Pass(stage, *queue.popleft()), self._edges.replica(stage, replica).device
        after = [self._last[at]] if at in self._last else []
        run = self._forward if which.kind == "forward" else self._backward
        with tf.device(device):
            self._last[at] = run(which, device, after)
        return True

    def _is_ready(self, stage: int, kind: str, number: int) -> bool:
        own = self._stages[stage]
        if kind == "forward":
            given = self._given[stage, number].tensors
            return all(token in given or token in self._units.inputs for token in own.taken)
        made = self._results[stage][number].tensors
        expected = {
            (token, reader)
            for token in own.sent
            for reader in self._edges.answering(token, made[token].dtype)
        }
        return expected <= self._answers[stage, number].keys()

    def _forward(self, which: Pass, device: str, after: list[tf.Operation]) -> tf.Operation:
        stage, _, number = which
        own, given = self._stages[stage], self._given[stage, number]
        inputs = self._inputs[number]
        given.tensors.update((t, tf.identity(inputs[t])) for t in own.taken if t in inputs)
        if self._clock is not None:
            taken = {token: given.tensors[token] for token in own.taken}
            after = self._clock.begin(which, device, list(taken.values()), after)
            with tf.control_dependencies(after):
                given.tensors.update((token, tf.identity(taken[token])) for token in taken)
        received = {
            token: given.tensors[token]
            for token in own.taken
            if token not in inputs and given.tensors[token].dtype.is_floating
        }
        weights = self._weights[stage, device]
        state = own.state_of_micro_batch(self._state_before[stage], number)
        end_emulated = self._emulated(which, device, list(received.values()), after)
        with (
            tf.control_dependencies(after),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            if self._training:
                tape.watch([*received.values(), *weights])
            result = own.forward(weights, state, given.tensors, given.masks, self._training)
        self._results[stage][number] = result
        if self._training:
            self._pending[stage, number] = tape, received
        weight = self._batches.weight(number)
        self.losses.append(result.means * tf.cast(weight, result.means.dtype))
        self.losses.append(result.sums * tf.cast(weight > 0, result.sums.dtype))
        sent = list(result.tensors.values())
        if end_emulated is not None:
            sent = end_emulated(sent or [result.means])[: len(sent)]
        for token, tensor in zip(result.tensors, sent, strict=True):
            self._deliver(token, number, tensor, result.masks.get(token))
            self._messages.send_everywhere(token, number, tensor, result.masks.get(token))
        # all of them: a function that TensorFlow has inlined does not end as one
        made = [*sent, *result.state, result.means, result.sums]
        if self._clock is not None:
            return tf.group(*made, self._clock.end(which, device, made))
        return tf.group(*made)

    def _emulated(
        self, which: Pass, device: str, inputs: list[tf.Tensor], after: list[tf.Operation]
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None:
        if self._emulation is None:
            return None
        begin, end = self._batches.offset(which.micro_batch)
        planned = self._plan.stages[which.stage]
        return self._emulation.begin(device, planned, which.kind, end - begin, inputs, after)

    def _deliver(
        self, token: Token, number: int, tensor: tf.Tensor, mask: tf.Tensor | None
    ) -> None:
        """Move a tensor to the places in this process that take it."""
        takers = self._edges.takers(token, number, self._training, self._is_additive)
        for taker, place in takers.items():
            if place.process != self._process:
                continue
            given = self._given[taker, number]
            with tf.device(place.device):
                given.tensors[token] = tf.identity(tensor)
                if mask is not None:
                    given.masks[token] = tf.identity(mask)
            if taker in (HEAD, COLLECTOR):
                self._take_outputs(taker, number, place)

    def _take_outputs(self, taker: int, number: int, place: Place) -> None:
        """Continue with the model's outputs of a micro-batch when all of them are there."""
        given = self._given[taker, number]
        if not all(token in given.tensors for token in self._edges.outputs):
            return
        known = {**self._inputs[number], **given.tensors}
        outputs = [known[token] for token in self._units.outputs]
        if taker == COLLECTOR:
            self.outputs[number] = outputs
            self.output_masks[number] = [given.masks.get(t) for t in self._units.outputs]
            if not self._is_additive and len(self.outputs) == self._plan.num_micro_batches:
                with tf.device(place.device):
                    found = self._loss.whole_batch_gradients(self.outputs, self.output_masks)
                    for each, gradients in found.items():
                        self._return_from_head(each, gradients)
        elif self._is_additive:
            with tf.device(place.device):
                self._return_from_head(number, self._loss.micro_batch_gradients(number, outputs))

    def _return_from_head(self, number: int, gradients: list[tf.Tensor | None]) -> None:
        taken = self._given[HEAD if self._is_additive else COLLECTOR, number].tensors
        # a tensor that the model returns twice has the whole gradient both times
        for token, gradient in dict(zip(self._units.outputs, gradients, strict=True)).items():
            if token in self._edges.maker:
                self._return(token, number, HEAD, gradient, taken[token])

    def _backward(self, which: Pass, device: str, after: list[tf.Operation]) -> tf.Operation:
        stage, _, number = which
        own, weight = self._stages[stage], self._batches.weight(number)
        tape, received = self._pending.pop((stage, number))
        result, answers = self._results[stage][number], self._answers[stage, number]
        means, sums = result.means, result.sums
        targets, seeds = [means, sums], [tf.cast(weight, means.dtype)]
        # rows that only fill up must not count in a sum
        seeds.append(tf.cast(weight > 0, sums.dtype))
        seeds = [self._loss.scale(seed) for seed in seeds]
        for token in own.sent:
            found = [g for (of, _), g in answers.items() if of == token and g is not None]
            if found:
                targets.append(result.tensors[token])
                seeds.append(tf.add_n(found))
        sources = [*received.values(), *self._weights[stage, device]]
        if self._clock is not None:
            after = self._clock.begin(which, device, seeds, after)
        with tf.control_dependencies([*after, *seeds]):
            # each seed after the pass before: otherwise TensorFlow may begin with some of it
            seeds = [tf.identity(seed) for seed in seeds]
        end_emulated = self._emulated(which, device, seeds, after)
        found = tape.gradient(targets, sources, output_gradients=seeds)
        if end_emulated is not None:
            flat = tf.nest.flatten(found, expand_composites=True)
            there = iter(end_emulated([value for value in flat if value is not None]))
            flat = [None if value is None else next(there) for value in flat]
            found = tf.nest.pack_sequence_as(found, flat, expand_composites=True)
        for (token, tensor), gradient in zip(received.items(), found, strict=False):
            self._return(token, number, stage, gradient, tensor)
        self._sums[stage].append(found[len(received) :])
        ends = [g.values if isinstance(g, tf.IndexedSlices) else g for g in found if g is not None]
        if self._clock is not None:
            ends.append(self._clock.end(which, device, ends or seeds))
        return tf.group(*ends, *after)

    def _return(
        self, token: Token, number: int, reader: int, gradient: tf.Tensor | None, like: tf.Tensor
    ) -> None:
        if self._edges.place(self._edges.maker[token], number).process == self._process:
            self._answer(token, number, reader, gradient)
        elif like.dtype.is_floating:
            value = tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)
            self._messages.send(Message("gradient", token, number, reader), value)

    def _answer(self, token: Token, number: int, reader: int, gradient: tf.Tensor | None) -> None:
        maker = self._edges.maker[token]
        if gradient is not None:
            with tf.device(self._edges.place(maker, number).device):
                gradient = tf.identity(tf.convert_to_tensor(gradient))
        self._answers[maker, number][token, reader] = gradient

    def _total_gradients(self, stage: int) -> list[Summand | None]:
        """Add up the gradients of this process's replicas of a stage, and of regularizers."""
        own = self._stages[stage]
        weights = next(values for (s, _), values in self._weights.items() if s == stage)
        is_owner = self._edges.processes_of(stage)[0] == self._process
        with tf.device(self.homes[stage]):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                pairs = zip(own.weights, weights, strict=True) if is_owner else ()
                losses = [v.regularizer(w) for v, w in pairs if v.regularizer is not None]
            self.losses.extend(losses)
            if not self._training:
                return []
            parts = list(self._sums[stage])
            if losses:
                seeds = [self._loss.scale(tf.ones([], loss.dtype)) for loss in losses]
                parts.append(tape.gradient(losses, weights, output_gradients=seeds))
            return [add_gradients([part[i] for part in parts]) for i in range(len(weights))]

    def changes(self, stage: int) -> list[StateChange]:
        with tf.device(self.homes[stage]):
            return self._stages[stage].changes(
                self._state_before[stage],
                self._results[stage],
                self._batches.weight,
                self._training,
            )


def _read(variables: Sequence[keras.Variable], device: str) -> list[tf.Tensor]:
    with tf.device(device):
        return [tf.identity(variable.value) for variable in variables]


def add_gradients(parts: Sequence[Summand | None]) -> Summand | None:
    """Add gradients of one weight; None if the loss does not depend on it."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    # sparse ones one after the other: for clipping, Keras takes the norm of their rows without
    # adding rows of the same number first
    if all(isinstance(part, tf.IndexedSlices) for part in found):
        return tf.IndexedSlices(
            tf.concat([part.values for part in found], 0),
            tf.concat([part.indices for part in found], 0),
            found[0].dense_shape,
        )
    dense = [tf.convert_to_tensor(part) for part in found]
    return tf.add_n(dense) if len(dense) > 1 else dense[0]
