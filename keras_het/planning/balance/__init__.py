"""Policies that split the global batch, one per file."""

from keras_het.planning.balance.boa import BoaPolicy
from keras_het.planning.balance.lb_bsp import LbBspPolicy
from keras_het.planning.balance.lbb import LbbPolicy
from keras_het.planning.balance.plan import BalancePlan
from keras_het.planning.balance.policy import BalancePolicy, SharePolicy
from keras_het.planning.balance.proportional import ProportionalPolicy
from keras_het.planning.balance.registry import POLICIES, make_policy
from keras_het.planning.balance.static import EvenPolicy, StaticPolicy

__all__ = [
    "POLICIES",
    "BalancePlan",
    "BalancePolicy",
    "BoaPolicy",
    "EvenPolicy",
    "LbBspPolicy",
    "LbbPolicy",
    "ProportionalPolicy",
    "SharePolicy",
    "StaticPolicy",
    "make_policy",
]
