"""Which pipelines begin every epoch in a state of their own, so that a handover must carry it."""

import pytest
import tensorflow as tf

from keras_het.loader.iterators.tunable import draws_an_order, shares_a_shuffle


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(8)


def shuffled_inside(number):
    return tf.data.Dataset.range(4).shuffle(4)


DRAWS = {
    "shuffle": lambda: numbers().shuffle(8).batch(2),
    "one order for ever": lambda: numbers().shuffle(8, reshuffle_each_iteration=False),
    "shuffle in a flat_map": lambda: numbers().flat_map(shuffled_inside),
    "random dataset": lambda: tf.data.Dataset.zip((numbers(), tf.data.Dataset.random(seed=1))),
    "random map": lambda: numbers().map(lambda number: tf.random.uniform([])),
}
DOES_NOT = {
    "map": lambda: numbers().map(lambda number: number + 1).batch(2).prefetch(1),
    "interleave": lambda: numbers().interleave(lambda number: tf.data.Dataset.range(number)),
    "zip and filter": lambda: tf.data.Dataset.zip((numbers(), numbers())).filter(
        lambda a, b: a % 2 == 0
    ),
    "cache": lambda: numbers().cache(),
}


@pytest.mark.parametrize("name", [*DRAWS, *DOES_NOT])
def test_what_draws_an_order(name):
    assert draws_an_order({**DRAWS, **DOES_NOT}[name]()) == (name in DRAWS)


def test_pipelines_over_one_shuffle_share_its_orders():
    rows = tf.data.Dataset.range(9)
    shuffled, fixed = rows.shuffle(3), rows.shuffle(3, reshuffle_each_iteration=False)
    for source, shares in ((shuffled, True), (fixed, False), (rows, False)):
        assert shares_a_shuffle(source.batch(2), source.map(lambda row: row).batch(2)) == shares
    assert not shares_a_shuffle(rows.shuffle(3, seed=1), rows.shuffle(3, seed=1))
