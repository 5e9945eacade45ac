"""Worker sides shared by several rules: their messages, and their handling of the answer."""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from keras_het.asynchronous.rules.update_rule import UpdateRule


class SendsGradient(UpdateRule):
    """The worker sends a mean gradient and continues from the center.

    It represents its weights as `seen` less the mean gradient of its steps, during which nothing
    moved. Steps taken while the answer travels are discarded: the next gradient is that of the
    center it received.
    """

    uses_gradients: ClassVar[bool] = True
    center_is_weights: ClassVar[bool] = True

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the gradient."""
        return seen - weights

    def message_of_gradient(self, gradient: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the gradient unchanged: taken from weights, small ones would be rounded away."""
        del seen
        return gradient

    def after_sending(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the last answer, because the service takes the step."""
        del weights
        return seen

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        """Return the center."""
        del weights, sent_weights
        return answer


class StepsItself(UpdateRule):
    """The worker's own optimizer runs, also while a message travels."""

    uses_gradients: ClassVar[bool] = False

    def after_sending(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the worker's own weights."""
        del seen
        return weights


class SendsChange(StepsItself):
    """The worker sends the change of its weights.

    Progress made while the answer travels is kept and becomes part of the next change.
    """

    center_is_weights: ClassVar[bool] = True

    def message(self, weights: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Return the change."""
        return weights - seen

    def receive(self, weights: tf.Tensor, sent_weights: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        """Return the center plus the worker's progress since sending."""
        return answer + (weights - sent_weights)
