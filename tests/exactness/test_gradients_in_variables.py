"""Train steps that keep gradients in variables, and apply them from there."""

import pytest
import tensorflow as tf
from equivalence import Trial, assert_equivalent, batches, three_replicas
from test_exact_own_steps import Base, compiled


class SmoothedGradients(Base):
    """Gradients that are kept, and applied from the variables."""

    as_keras_variables = True

    def build(self, shape):
        super().build(shape)
        self.kept = [
            self.add_weight(shape=weight.shape, initializer="zeros", trainable=False)
            for weight in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign(0.5 * kept + 0.5 * gradient)
        if self.as_keras_variables:
            self.optimizer.apply_gradients(zip(self.kept, self.trainable_variables, strict=True))
        else:
            self.optimizer.apply([kept.value for kept in self.kept], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.full
@pytest.mark.parametrize("as_keras_variables", [True, False])
def test_gradients_in_variables(monkeypatch, as_keras_variables):
    monkeypatch.setattr(SmoothedGradients, "as_keras_variables", as_keras_variables)
    trial = Trial(compiled(SmoothedGradients, metrics=None), evaluate=False)
    assert_equivalent(trial, [(4, 2, 1)])


class OwnVariables(SmoothedGradients):
    """Gradients in variables of which Keras knows nothing."""

    def build(self, shape):
        super().build(shape)
        self.kept = [tf.Variable(tf.zeros(weight.shape)) for weight in self.trainable_variables]


class Conditional(SmoothedGradients):
    """An update in a branch."""

    def train_step(self, data):
        def update():
            SmoothedGradients.train_step(self, data)
            return True

        tf.cond(tf.reduce_sum(data[0]) < 1e9, update, lambda: False)
        return {}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OwnVariables, r"must be in variables that Keras knows.*self\.add_weight"),
        (Conditional, r"within tf\.cond.*3 replicas of a process.*gradient_accumulation_steps"),
    ],
)
def test_updates_that_cannot_be_added_up(model, message):
    with three_replicas().scope():
        built = compiled(model, metrics=None)()
    with pytest.raises(ValueError, match=message):
        built.fit(batches(), verbose=0)
