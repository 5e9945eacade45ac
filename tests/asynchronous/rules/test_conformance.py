"""What every update rule promises, whatever its equations."""

import inspect
import json

import numpy as np
import pytest
from rule_checks import start_vector
from service_doubles import ASYNCHRONOUS, make_rule

from keras_het import rules
from keras_het.rules import SynchronousRule, UpdateRule

SYNCHRONOUS = {
    "diloco": {"period": 4},
    "sync_easgd": {"num_workers": 3},
}
CASES = {**ASYNCHRONOUS, **SYNCHRONOUS}


def test_every_rule_is_checked():
    assert {case.split()[0] for case in CASES} == set(rules.RULES)


@pytest.mark.parametrize("case", CASES)
def test_config_makes_an_equal_rule(logical_devices, case):
    rule = make_rule(case, CASES)
    config = json.loads(json.dumps(rules.serialize(rule)))  # plain values
    assert set(config["config"]) == set(inspect.signature(type(rule)).parameters)
    copy = rules.get(config)
    assert type(copy) is type(rule)
    assert rules.serialize(copy) == rules.serialize(rule)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_progress_while_the_answer_travels_is_kept_unless_gradients_travel(logical_devices, case):
    rule = make_rule(case)
    assert isinstance(rule, UpdateRule)
    assert rule.is_atomic or not rule.may_wait  # turns are kept under the lock
    sent, move, answer = (start_vector(i) for i in range(3))
    still, moved = rule.receive(sent, sent, answer), rule.receive(sent + move, sent, answer)
    kept = np.zeros_like(move) if rule.uses_gradients else move
    np.testing.assert_allclose(moved - still, kept, rtol=1e-4, atol=1e-5)
    assert np.allclose(still, answer, rtol=1e-6) == rule.center_is_weights


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_an_exchange_begins_once_in_a_period(case):
    rule = make_rule(case, SYNCHRONOUS)
    assert isinstance(rule, SynchronousRule)
    assert sum(map(rule.is_due, range(5 * rule.period + 1))) == 5
