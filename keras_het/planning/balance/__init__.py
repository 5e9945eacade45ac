"""Policies that split the global batch."""

from keras_het.planning.balance.boa import POLICIES, BoaPolicy, make_policy
from keras_het.planning.balance.policy import (
    BalancePlan,
    BalancePolicy,
    EvenPolicy,
    SharePolicy,
    StaticPolicy,
)

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
