"""What every update rule promises, whatever its equations."""

import inspect
import json

import numpy as np
import pytest
import tensorflow as tf
from rule_checks import SIZE, Center, Group, start_vector

from keras_het.asynchronous import rules
from keras_het.asynchronous.rules import SynchronousRule, UpdateRule

WORKERS = 3
ASHL_SETTINGS = {
    "data_shares": [0.5, 0.3, 0.2],
    "steps": [8, 5, 3],
    "second_steps": [3, 2, 1],
    "loss_threshold": 0.5,
}
ASYNCHRONOUS = {
    "ashl": ASHL_SETTINGS,
    "ashl measured": {"loss_threshold": 0.5, "num_workers": WORKERS},
    "async_easgd": {"num_workers": WORKERS},
    "async_measgd": {"num_workers": WORKERS},
    "async_sgd": {"learning_rate": 0.1},
    "async_sgd momentum": {"learning_rate": 0.1, "momentum": 0.5, "damps_staleness": True},
    "async_sgd keras": {"optimizer": "adam", "reference_samples": 8, "warm_up_pushes": 4},
    "delay_compensated": {"learning_rate": 0.1, "compensation": 0.4, "num_workers": WORKERS},
    "delay_compensated adaptive": {
        "learning_rate": 0.1,
        "compensation": 2.0,
        "num_workers": WORKERS,
        "decay": 0.9,
    },
    "delayed_nesterov": {"num_workers": WORKERS, "period": 4},
    "delta": {},
    "delta scaled": {"scale": 0.3},
    "elastic_averaging": {"alpha": 0.4},
    "hogwild_easgd": {"num_workers": WORKERS},
    "round_robin_easgd": {"num_workers": WORKERS},
}
SYNCHRONOUS = {
    "diloco": {"period": 4},
    "streaming_diloco": {"period": 8, "num_fragments": 2, "overlap": 1},
    "sync_easgd": {"num_workers": WORKERS},
}


def make(case):
    settings = {**ASYNCHRONOUS, **SYNCHRONOUS}[case]
    return rules.get({"class_name": case.split()[0], "config": settings})


def push_some(center, first, last):
    for turn in range(first, last):
        message = np.random.default_rng(turn).normal(size=SIZE)
        seen = max(0, center.version - turn % WORKERS)
        assert center.push(turn % WORKERS, 4 + turn, seen, message) is not None


def test_every_rule_is_checked():
    checked = {case.split()[0] for case in [*ASYNCHRONOUS, *SYNCHRONOUS]}
    assert checked == set(rules.RULES)


@pytest.mark.parametrize("case", [*ASYNCHRONOUS, *SYNCHRONOUS])
def test_config_makes_an_equal_rule(logical_devices, case):
    rule = make(case)
    config = json.loads(json.dumps(rules.serialize(rule)))  # plain values
    assert set(config["config"]) == set(inspect.signature(type(rule)).parameters)
    copy = rules.get(config)
    assert type(copy) is type(rule)
    assert rules.serialize(copy) == rules.serialize(rule)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_what_it_says_of_itself(case):
    rule = make(case)
    assert isinstance(rule, UpdateRule)
    flags = (rule.is_atomic, rule.may_wait, rule.uses_gradients, rule.center_is_weights)
    assert all(isinstance(flag, bool) for flag in flags)
    assert rule.is_atomic or not rule.may_wait  # turns are kept under the lock


@pytest.mark.quick("ashl measured", "async_sgd momentum", "delayed_nesterov", "round_robin_easgd")
@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_all_state_is_in_the_slots(logical_devices, case):
    one, other = Center(make(case), start_vector()), Center(make(case), start_vector(5))
    push_some(one, 0, 4)
    push_some(other, 0, 2)
    other.parts, other.version = [part.copy() for part in one.parts], one.version
    other.slots = list(one.slots)
    push_some(one, 4, 9)
    push_some(other, 4, 9)
    np.testing.assert_array_equal(other.values, one.values)


@pytest.mark.quick("async_sgd momentum", "round_robin_easgd")
@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_two_centers_of_one_rule_do_not_touch_each_other(logical_devices, case):
    rule = make(case)
    alone, one, other = (
        Center(make(case), start_vector()),
        Center(rule, start_vector()),
        Center(rule, start_vector(3)),
    )
    push_some(other, 0, 3)
    push_some(one, 0, 4)
    push_some(alone, 0, 4)
    np.testing.assert_array_equal(one.values, alone.values)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_worker_side_works_element_by_element(case):
    rule = make(case)

    def results(*vectors):
        one, two, three = vectors
        return rule.message(one, two), rule.after_sending(one, two), rule.receive(one, two, three)

    vectors = [start_vector(i) for i in range(3)]
    for index in range(0, SIZE, 5):
        parts = results(*(vector[index : index + 5] for vector in vectors))
        for whole, part in zip(results(*vectors), parts, strict=True):
            assert part.dtype == np.float32
            np.testing.assert_array_equal(whole[index : index + 5], part)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_progress_while_the_answer_travels_is_kept_unless_gradients_travel(case):
    rule = make(case)
    sent, move, answer = (start_vector(i) for i in range(3))
    still, moved = rule.receive(sent, sent, answer), rule.receive(sent + move, sent, answer)
    kept = np.zeros_like(move) if rule.uses_gradients else move
    np.testing.assert_allclose(moved - still, kept, rtol=1e-4, atol=1e-5)
    if rule.center_is_weights:
        np.testing.assert_allclose(still, answer, rtol=1e-6)


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_synchronous_rules_keep_one_state_and_send_one_buffer(logical_devices, case):
    rule = make(case)
    assert isinstance(rule, SynchronousRule)
    assert isinstance(rule.center_is_weights, bool)
    group = Group(rule, [start_vector()] * WORKERS)
    assert "center" in group.states[0]
    for step in range(5):
        moves = np.random.default_rng(step).normal(size=(WORKERS, SIZE)).astype("float32")
        group.weights = [w + m for w, m in zip(group.weights, moves, strict=True)]
        group.exchange([3.0, 5.0, 2.0])
        group.assert_states_are_identical()
        assert np.isfinite(group.weights).all()
    if rule.center_is_weights:
        np.testing.assert_array_equal(group.weights[1], group.states[1]["center"])


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_synchronous_rules_work_element_by_element(logical_devices, case):
    groups = [
        Group(make(case), [start_vector()[part]] * WORKERS)
        for part in (slice(0, SIZE), slice(0, 7), slice(7, SIZE))
    ]
    for step in range(3):
        moves = np.random.default_rng(step).normal(size=(WORKERS, SIZE)).astype("float32")
        for group, part in zip(groups, (slice(0, SIZE), slice(0, 7), slice(7, SIZE)), strict=True):
            group.weights = [w + m[part] for w, m in zip(group.weights, moves, strict=True)]
            group.exchange([3.0, 5.0, 2.0])
    joined = np.concatenate([np.array(group.weights) for group in groups[1:]], axis=1)
    np.testing.assert_allclose(groups[0].weights, joined, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_synchronous_rules_work_in_the_graph(logical_devices, case):
    rule, weights = make(case), tf.constant(start_vector(1))
    state = rule.initial_state(tf.constant(start_vector()))

    def combine(samples):
        return tf.nest.flatten(rule.combine(weights, state, samples, lambda own: 2.0 * own))

    of_graph = tf.function(combine)(tf.constant(3.0))
    for got, want in zip(of_graph, combine(tf.constant(3.0)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_every_variable_is_in_one_fragment(case):
    rule = make(case)
    for number in (1, 2, 7):
        fragments = rule.fragments([4] * number)
        assert sorted(v for fragment in fragments for v in fragment) == list(range(number))
        due = [
            sum(rule.is_due(t, p, len(fragments)) for t in range(1, 5 * rule.period + 1))
            for p in range(len(fragments))
        ]
        assert due == [5] * len(fragments)
