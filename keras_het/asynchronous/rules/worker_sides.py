"""What workers send, and what they do with the answer, where several rules have it in common."""

from __future__ import annotations

from typing import Any, ClassVar

from keras_het.asynchronous.rules.update_rule import UpdateRule


class SendsGradient(UpdateRule):
    """The worker sends a mean gradient and goes on from the center.

    What it gives for its weights is `seen` less the mean gradient of its steps, in which nothing
    moved. Steps that it takes while the answer travels are not kept: the next gradient is that
    of the center it got.
    """

    uses_gradients: ClassVar[bool] = True
    center_is_weights: ClassVar[bool] = True

    def message(self, weights: Any, seen: Any) -> Any:
        """The gradient."""
        return seen - weights

    def message_of_gradient(self, gradient: Any, seen: Any) -> Any:
        """The gradient as it is: taken from weights, small ones would be rounded away."""
        del seen
        return gradient

    def after_sending(self, weights: Any, seen: Any) -> Any:
        """What it had seen: the service takes the step."""
        del weights
        return seen

    def receive(self, weights: Any, sent_weights: Any, answer: Any) -> Any:
        """The center."""
        del weights, sent_weights
        return answer


class SendsChange(UpdateRule):
    """The worker's own optimizer works; it sends by how much its weights changed.

    Progress made while the answer travels is kept, and is part of the next change.
    """

    uses_gradients: ClassVar[bool] = False
    center_is_weights: ClassVar[bool] = True

    def message(self, weights: Any, seen: Any) -> Any:
        """The change."""
        return weights - seen

    def after_sending(self, weights: Any, seen: Any) -> Any:
        """Its own weights."""
        del seen
        return weights

    def receive(self, weights: Any, sent_weights: Any, answer: Any) -> Any:
        """The center, and what the worker has moved since it sent."""
        return answer + (weights - sent_weights)
