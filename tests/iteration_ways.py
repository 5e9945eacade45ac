"""Every way of `tf.distribute` to iterate a distributed dataset of numbers.

Each takes a strategy and a dataset that has `NUM_STEPS` batches, and returns the sum of what the
replicas got in each step.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

NUM_STEPS = 3


def summed(strategy: Any, batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)


def collected(strategy: Any, batches: Any) -> Any:
    """The sums of all steps of a loop in a graph."""
    sums = tf.TensorArray(tf.int64, 0, dynamic_size=True)
    for batch in batches:
        sums = sums.write(sums.size(), summed(strategy, batch))
    return sums.stack()


def for_in_function(strategy: Any, dataset: Any) -> list[int]:
    return tf.function(collected)(strategy, dataset).numpy().tolist()


def for_over_a_captured_dataset(strategy: Any, dataset: Any) -> list[int]:
    total = tf.Variable(tf.zeros([0], tf.int64), shape=[None])

    @tf.function
    def loop():
        for batch in dataset:
            total.assign(tf.concat([total, [summed(strategy, batch)]], axis=0))

    loop()
    return total.numpy().tolist()


def for_over_an_iterator(strategy: Any, dataset: Any) -> list[int]:
    return tf.function(collected)(strategy, iter(dataset)).numpy().tolist()


def for_over_a_captured_iterator(strategy: Any, dataset: Any) -> list[int]:
    iterator = iter(dataset)

    @tf.function
    def loop():
        return collected(strategy, iterator)

    return loop().numpy().tolist()


def break_in_a_loop_over_an_iterator(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def loop(iterator, last):
        sums = tf.TensorArray(tf.int64, 0, dynamic_size=True)
        for batch in iterator:
            sums = sums.write(sums.size(), summed(strategy, batch))
            if sums.size() >= last:
                break
        return sums.stack()

    iterator = iter(dataset)
    return [*loop(iterator, tf.constant(2)).numpy(), int(summed(strategy, next(iterator)))]


def steps_of_a_range(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def loop(iterator):
        sums = tf.TensorArray(tf.int64, 0, dynamic_size=True)
        for step in tf.range(NUM_STEPS):
            sums = sums.write(step, summed(strategy, next(iterator)))
        return sums.stack()

    return loop(iter(dataset)).numpy().tolist()


def next_in_function(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def step(iterator):
        return summed(strategy, next(iterator))

    iterator = iter(dataset)
    return [int(step(iterator)) for _ in range(NUM_STEPS)]


def get_next_in_function(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def step(iterator):
        return summed(strategy, iterator.get_next())

    iterator = iter(dataset)
    return [int(step(iterator)) for _ in range(NUM_STEPS)]


def get_next_eagerly(strategy: Any, dataset: Any) -> list[int]:
    iterator, sums = iter(dataset), []
    while True:
        try:
            batch = iterator.get_next()
        except tf.errors.OutOfRangeError:
            return sums
        sums.append(int(summed(strategy, batch)))


def optional_eagerly(strategy: Any, dataset: Any) -> list[int]:
    iterator, sums = iter(dataset), []
    optional = iterator.get_next_as_optional()
    while optional.has_value():
        sums.append(int(summed(strategy, optional.get_value())))
        optional = iterator.get_next_as_optional()
    return sums


def optional_in_function(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def loop(iterator):
        sums = tf.TensorArray(tf.int64, 0, dynamic_size=True)
        for _ in tf.range(10):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            sums = sums.write(sums.size(), summed(strategy, optional.get_value()))
        return sums.stack()

    return loop(iter(dataset)).numpy().tolist()


def iter_in_function(strategy: Any, dataset: Any) -> list[int]:
    @tf.function
    def loop(dataset):
        iterator = iter(dataset)
        return [summed(strategy, next(iterator)) for _ in range(NUM_STEPS)]

    return [int(value) for value in loop(dataset)]


def input_signature(strategy: Any, dataset: Any) -> list[int]:
    @tf.function(input_signature=[dataset.element_spec])
    def step(batch):
        return summed(strategy, batch)

    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    return [int(step(batch)) for batch in iterator]


def signature_of_an_iterator(strategy: Any, dataset: Any) -> list[int]:
    iterator = iter(dataset)

    @tf.function(input_signature=[iterator._type_spec])
    def step(iterator):
        return summed(strategy, next(iterator))

    return [int(step(iterator)) for _ in range(NUM_STEPS)]


def in_python(strategy: Any, dataset: Any) -> list[int]:
    return [int(summed(strategy, batch)) for batch in dataset]


WAYS = (
    for_in_function, for_over_a_captured_dataset, for_over_an_iterator,
    for_over_a_captured_iterator, break_in_a_loop_over_an_iterator, steps_of_a_range,
    next_in_function, get_next_in_function, get_next_eagerly, optional_eagerly,
    optional_in_function, iter_in_function, input_signature, signature_of_an_iterator, in_python,
)  # fmt: skip
