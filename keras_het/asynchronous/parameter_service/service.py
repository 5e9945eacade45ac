"""What a process holds of the center: parts that workers push to and pull from by messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeAlias

from keras_het.asynchronous.parameter_service.part import (
    Answer,
    Part,
    Push,
    pack_state,
    unpack_state,
)
from keras_het.asynchronous.parameter_service.wire import FloatWire, Partitions, Wire
from keras_het.exchange.message import Kind, Message, Status
from keras_het.rules import UpdateRule

Result: TypeAlias = "Message | Future[Message]"


class ParameterService:
    """Parts of the center in this process, by number.

    Each part has a version that counts its updates; a push states the version that the worker last
    saw. Updates of a part run one after another, so no push is lost and versions count every one. A
    push may carry a number: a push whose answer was lost can be sent again and counts once. A
    request of an unknown worker or with values that are not finite changes nothing, nor does one
    that would leave the center or the rule's state not finite; after the training is closed no push
    does. Others can push and pull only after the center has been restored (`Status.NO_CENTER`).

    Args:
        num_workers: number of workers that may push; they are numbered from 0.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.parts: dict[int, Part] = {}
        self._wires: dict[int, Wire] = {}
        self._answers: dict[Kind, Callable[[int, Message], Result]] = {
            **dict.fromkeys((Kind.PUSH, Kind.PUSH_16, Kind.PUSH_TOP), self._push),
            Kind.PULL: self._pull,
            Kind.RESTORE: self._restore,
            Kind.EXPORT: self._export,
            Kind.STATE: self._set_state,
            Kind.LEAVE: self._leave,
            Kind.LATEST: self._latest,
            Kind.CLOSE_TRAINING: self._close_training,
        }
        self.kinds = frozenset(self._answers)

    def hold(
        self,
        partitions: Partitions,
        rule: UpdateRule,
        first: int = 0,
        indices: Iterable[int] | None = None,
        wire: Wire | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """Add parts of one vector.

        Args:
            partitions: the cuts of the vector.
            rule: combines pushes with the center.
            first: number of the vector's first part.
            indices: which of its partitions this process holds; all by default.
            wire: format of the values.
            max_staleness: as for `Part`.

        Raises:
            ValueError: if the rule was made for fewer workers: some would share another's state, or
                never have their turn.
        """
        made_for = rule.get_config().get("num_workers")
        if made_for is not None and made_for < self._num_workers:
            raise ValueError(
                f"The rule {rule.name!r} was made for {made_for} workers. Received: a service with "
                f"{self._num_workers}. Give the rule num_workers={self._num_workers}."
            )
        sizes = partitions.sizes
        for index in range(len(sizes)) if indices is None else indices:
            part = Part(sizes[index], rule, self._num_workers, max_staleness)
            self.parts[first + index] = part
            self._wires[first + index] = wire or FloatWire()

    def handle(self, sender: int, request: Message) -> Result:
        """Answer a message of a participant.

        Raises:
            PermissionError: if an unknown worker asks for its latest push, as all do first.
            ValueError: for a request that makes no sense; it changes nothing.
        """
        if request.kind not in self._answers:
            raise ValueError(f"Received: {request.kind.name}; expected: one about the center.")
        return self._answers[request.kind](sender, request)

    def handle_own(self, sender: int, request: Message) -> Result:
        """Answer a message of the leader in this process, never too far behind, nor rounded."""
        if request.kind == Kind.PUSH:
            return self._push(sender, request, is_trusted=True)
        if request.kind == Kind.PULL:
            return _encoded(FloatWire(), self._part(request.numbers[0]).pull())
        if request.kind == Kind.RESTORE:
            return self._restore(sender, request, is_trusted=True)
        return self.handle(sender, request)

    def _part(self, number: int) -> Part:
        if number not in self.parts:
            raise ValueError(f"This process does not hold the part. Received: {number}.")
        return self.parts[number]

    def _pull(self, sender: int, request: Message) -> Result:
        number, is_exact = request.numbers
        part = self._part(number)
        return _encoded(FloatWire() if is_exact else self._wires[number], part.pull())

    def _push(self, sender: int, request: Message, is_trusted: bool = False) -> Result:
        number, push, version, samples = request.numbers
        part, wire = self._part(number), FloatWire() if is_trusted else self._wires[number]
        if request.kind != wire.push:
            raise ValueError(f"Received: {request.kind.name}; expected: {wire.push.name}.")
        change = wire.decode(request.vectors, part.size)
        answer = part.push(Push(sender, push, version, samples, change, is_trusted))
        return _encoded(wire, answer) if isinstance(answer, Answer) else _later(wire, answer)

    def _restore(self, sender: int, request: Message, is_trusted: bool = False) -> Message:
        center, latest = request.vectors
        part = self._part(request.numbers[0])
        status = part.set_center(center, latest if len(latest) else None, is_trusted)
        return Message(Kind.STATUS, (status, 0))

    def _export(self, sender: int, request: Message) -> Message:
        (number,) = request.numbers
        return Message(Kind.STATE, (number,), pack_state(self._part(number).state()))

    def _set_state(self, sender: int, request: Message) -> Message:
        part = self._part(request.numbers[0])
        return Message(Kind.STATUS, (part.set_state(unpack_state(*request.vectors)), 0))

    def _leave(self, sender: int, request: Message) -> Message:
        number, worker = request.numbers
        if not 0 <= worker < self._num_workers:
            raise ValueError(f"There is no such worker. Received: {worker}.")
        self._part(number).leave(worker)
        return Message(Kind.STATUS, (Status.OK, 0))

    def _latest(self, sender: int, request: Message) -> Message:
        if not 0 <= sender < self._num_workers:
            raise PermissionError(
                f"There is no such worker. Received: {sender}; expected: one of "
                f"{self._num_workers}, from 0."
            )
        latest = max((int(part.latest[sender]) for part in self.parts.values()), default=0)
        return Message(Kind.STATUS, (Status.OK, latest))

    def _close_training(self, sender: int, request: Message) -> Message:
        for part in self.parts.values():
            part.close()
        return Message(Kind.STATUS, (Status.OK, 0))


def _encoded(wire: Wire, answer: Answer) -> Message:
    if answer.values is None or answer.latest is None:
        return Message(Kind.STATUS, (answer.status, answer.version))
    numbers = answer.status, answer.version
    return Message(wire.answer, numbers, (wire.encode_answer(answer.values), answer.latest))


def _later(wire: Wire, answer: Future[Answer]) -> Future[Message]:
    message: Future[Message] = Future()

    def pass_on(done: Future[Answer]) -> None:
        try:
            message.set_result(_encoded(wire, done.result()))
        except Exception as error:
            message.set_exception(error)

    answer.add_done_callback(pass_on)
    return message
