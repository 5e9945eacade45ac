"""What a process holds of the center: parts that workers push to and pull from by messages."""

from __future__ import annotations

from collections.abc import Container
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
_PUSHES = {Kind.PUSH, Kind.PUSH_16, Kind.PUSH_TOP}
_ABOUT_A_PART = {Kind.PULL, Kind.RESTORE, Kind.EXPORT, Kind.STATE, Kind.LEAVE, *_PUSHES}
_DONE = Message(Kind.STATUS, (Status.OK, 0))


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

    def hold(
        self,
        partitions: Partitions,
        rule: UpdateRule,
        first: int = 0,
        held: Container[int] | None = None,
        wire: Wire | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """Add parts of one vector.

        Args:
            partitions: the cuts of the vector.
            rule: combines pushes with the center.
            first: number of the vector's first part.
            held: numbers of the parts that this process holds; all by default.
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
        for number, size in enumerate(partitions.sizes, first):
            if held is None or number in held:
                self.parts[number] = Part(size, rule, self._num_workers, max_staleness)
                self._wires[number] = wire or FloatWire()

    def handle(self, sender: int, request: Message, is_own: bool = False) -> Result:
        """Answer a message of a participant.

        Args:
            sender: number of the participant.
            request: its message.
            is_own: whether it is the leader in this process, never too far behind, nor rounded.

        Raises:
            PermissionError: if an unknown worker asks for its latest push, as all do first.
            ValueError: for a request that makes no sense; it changes nothing.
        """
        if request.kind == Kind.LATEST:
            return Message(Kind.STATUS, (Status.OK, self._latest(sender)))
        if request.kind == Kind.CLOSE_TRAINING:
            for part in self.parts.values():
                part.close()
            return _DONE
        if request.kind not in _ABOUT_A_PART:
            raise ValueError(f"Received: {request.kind.name}; expected: one about the center.")
        number, *numbers = request.numbers
        if number not in self.parts:
            raise ValueError(f"This process does not hold the part. Received: {number}.")
        part, wire = self.parts[number], FloatWire() if is_own else self._wires[number]
        match request.kind:
            case Kind.PULL:
                return _encoded(FloatWire() if numbers[0] else wire, part.pull())
            case Kind.RESTORE:
                center, latest = request.vectors
                part.set_center(center, latest if len(latest) else None, is_own)
                return _DONE
            case Kind.EXPORT:
                return Message(Kind.STATE, (number,), pack_state(part.state()))
            case Kind.STATE:
                part.set_state(unpack_state(*request.vectors))
                return _DONE
            case Kind.LEAVE:
                (worker,) = numbers
                if not 0 <= worker < self._num_workers:
                    raise ValueError(f"There is no such worker. Received: {worker}.")
                part.leave(worker)
                return _DONE
        if request.kind != wire.push:
            raise ValueError(f"Received: {request.kind.name}; expected: {wire.push.name}.")
        change = wire.decode(request.vectors, part.size)
        push, version, samples = numbers
        answer = part.push(Push(sender, push, version, samples, change, is_own))
        return _encoded(wire, answer) if isinstance(answer, Answer) else _later(wire, answer)

    def _latest(self, sender: int) -> int:
        if not 0 <= sender < self._num_workers:
            raise PermissionError(
                f"There is no such worker. Received: {sender}; expected: one of "
                f"{self._num_workers}, from 0."
            )
        return max((int(part.latest[sender]) for part in self.parts.values()), default=0)


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
