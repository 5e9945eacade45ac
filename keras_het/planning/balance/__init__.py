"""Policies that split the global batch."""

from keras_het.planning.balance.boa import BoaPolicy
from keras_het.planning.balance.plan import BalancePlan
from keras_het.planning.balance.policy import (
    BalancePolicy,
    EvenPolicy,
    SharePolicy,
    StaticPolicy,
)
from keras_het.planning.balance.registry import POLICIES, make_policy

__all__ = [
    "POLICIES",
    "BalancePlan",
    "BalancePolicy",
    "BoaPolicy",
    "EvenPolicy",
    "SharePolicy",
    "StaticPolicy",
    "make_policy",
]
