"""Description of a training for a parameter service: plain values that travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from keras_het.asynchronous.exchange.participant import Participant
from keras_het.asynchronous.parameter_service.wire import Wire, wire_named
from keras_het.asynchronous.rules import UpdateRule, get, serialize

Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """A training's variables, rule and participants."""

    shapes: Shapes
    state_shapes: Shapes
    rule: dict[str, Any]
    state_rule: dict[str, Any]
    wire: str
    num_participants: int
    staleness_bound: int | None
    fingerprint: str
    num_services: int
    partition_size: int

    def make_rules(self) -> tuple[UpdateRule, UpdateRule]:
        """Create the rules of weights and moving statistics."""
        rules = [get(dict(described)) for described in (self.rule, self.state_rule)]
        for rule in rules:
            if not isinstance(rule, UpdateRule):
                raise ValueError(
                    f"A parameter service cannot run the synchronous rule {rule.name!r}."
                )
        return rules[0], rules[1]  # type: ignore[return-value]

    def make_wire(self) -> Wire:
        """Create the format of the weights."""
        return wire_named(self.wire)

    def to_json(self) -> str:
        """Return the description as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceSpec:
        """Restore a description from the result of `to_json`."""
        try:
            values = json.loads(text)
            for name in ("shapes", "state_shapes"):
                values[name] = tuple(tuple(map(int, shape)) for shape in values[name])
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"The description of a training cannot be read. Received: {text[:200]!r} "
                f"({error}). Use the same version of keras_het on every task."
            ) from error


def spec_of(participant: Participant, num_services: int) -> ServiceSpec:
    """Describe the training of a participant."""
    vectors, options = participant.vectors, participant.options
    state = vectors.state.partitions.shapes if vectors.state is not None else ()
    return ServiceSpec(
        shapes=vectors.weights.partitions.shapes,
        state_shapes=state,
        rule=serialize(participant.rule),
        state_rule=serialize(participant.state_rule),
        wire=options.weights_wire.name,
        num_participants=participant.num_participants,
        staleness_bound=options.staleness_bound,
        fingerprint=participant.service_fingerprint,
        num_services=num_services,
        partition_size=vectors.weights.partitions.partition_size,
    )
