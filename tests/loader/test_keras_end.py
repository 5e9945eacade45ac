"""Ends of epochs as Keras steps through them, with several steps an execution."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import Schedule

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

ONE = ReplicaLayout((1,), 0)


def single(batches, sizes):
    return batches[0]


def pairs(steps, known=True):
    dataset = tf.data.Dataset.range(steps * 2)
    if not known:
        dataset = dataset.filter(lambda index: index >= 0)
    return dataset.map(lambda i: (tf.cast(tf.stack([i, 1]), tf.float32), i)).batch(2)


def distributed(dataset):
    return GlobalOrderDataset(dataset, ONE, Schedule([[1]]), single)


class Seen(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.labels = []

    def call(self, x):
        return x[:, :1] * self.scale

    def train_step(self, data):
        self.labels += data[1].numpy().tolist()
        return super().train_step(data)


def model(steps_per_execution):
    seen = Seen()
    seen.compile("sgd", "mse", run_eagerly=True, steps_per_execution=steps_per_execution)
    seen.optimizer.learning_rate = 0.0
    return seen


@pytest.mark.quick("1-2-False", "3-2-True")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_fit_sees_every_sample_of_every_epoch(steps_per_execution, steps, known):
    seen = model(steps_per_execution)
    dataset = distributed(pairs(steps, known))
    seen.fit(dataset, epochs=3, verbose=0)
    assert seen.labels == list(range(2 * steps)) * 3


@pytest.mark.quick("3-False")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_evaluate_and_predict(steps_per_execution, known):
    for steps in (2, 3):
        seen = model(steps_per_execution)
        values = seen.predict(distributed(pairs(steps, known)), verbose=0)
        np.testing.assert_array_equal(values[:, 0], np.arange(2 * steps))
        assert seen.evaluate(distributed(pairs(steps, known)), verbose=0) == 0.0


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_steps_per_epoch_continues_in_the_same_pass():
    seen = model(1)
    seen.fit(distributed(pairs(6).repeat()), epochs=3, steps_per_epoch=4, verbose=0)
    assert seen.labels == [*range(12), *range(12)]


@pytest.mark.parametrize(("steps", "known", "counts"), [(3, False, [3]), (4, True, [3, 1])])
def test_an_execution_ends_with_what_it_has_or_out_of_range(steps, known, counts):
    iterator = iter(distributed(pairs(steps, known)))
    assert [len(list(zip(range(3), iterator, strict=False))) for _ in counts] == counts
    with pytest.raises(tf.errors.OutOfRangeError, match="End of the data"):
        list(zip(range(3), iterator, strict=False))


def test_an_ordinary_loop_ends_also_over_no_data():
    assert len(list(distributed(pairs(4)))) == 4
    assert [element for element in distributed(pairs(4).take(0))] == []
    assert len(distributed(pairs(4))) == 4
    with pytest.raises(TypeError, match="unknown or infinite"):
        len(distributed(pairs(4, known=False)))


def test_counters():
    iterator = iter(distributed(tf.data.Dataset.range(7).batch(3)))
    counted = []
    for _ in range(3):
        next(iterator)
        counted.append((iterator.step, iterator.samples))
        assert iterator.input_wait_seconds > 0
    assert counted == [(1, 3), (2, 6), (3, 7)]
    assert iterator.pass_number == 0


def first_label(element):
    return int(element[1][0])


def shuffled():
    return distributed(
        tf.data.Dataset.range(64).shuffle(64, seed=1).map(lambda i: ([i], i)).batch(4)
    )


def test_a_look_at_the_first_element_costs_no_epoch():
    def orders(dataset, epochs):
        return [[first_label(element) for element in dataset] for _ in range(epochs)]

    plain, looked_at = shuffled(), shuffled()
    expected = orders(plain, 3)
    seen = []
    for _ in range(3):
        next(iter(looked_at))  # as Keras does to build a model, and before each evaluation
        seen += orders(looked_at, 1)
    assert seen == expected
    assert looked_at.pipelines_built <= 2


def test_looking_twice_moves_on():
    dataset = shuffled()
    looks = [first_label(next(iter(dataset))) for _ in range(4)]
    assert looks[0] == looks[1]
    assert looks[2] == looks[3]
    assert looks[1] != looks[2]


def test_two_iterators_at_once_are_two_epochs():
    dataset = distributed(tf.data.Dataset.range(6).map(lambda i: ([i], i)).batch(2))
    together = [(first_label(a), first_label(b)) for a, b in zip(dataset, dataset, strict=True)]
    assert together == [(0, 0), (2, 2), (4, 4)]
