"""Pure decisions about the distribution of work, with numpy and the standard library only."""

from keras_het.planning.balance import BalancePlan, BalancePolicy, make_policy
from keras_het.planning.balance.min_max import (
    min_max_shares,
    min_max_shares_linear,
)
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.roles.exchange_settings import ExchangeSettings, PushPlan, plan_pushes
from keras_het.planning.roles.roles import ClusterSpeeds, ModePrediction, RolePlan, advise_roles
from keras_het.planning.roles.summation_placement import (
    SummationPlan,
    plan_summation,
)
from keras_het.planning.shares import apportion, proportional_shares
from keras_het.planning.time_model import (
    LinearTimeModel,
    MicroBatchTimeModel,
)
from keras_het.planning.time_model_fit import TimeModelFit

__all__ = [
    "BalancePlan",
    "BalancePolicy",
    "ClusterSpeeds",
    "ExchangeSettings",
    "LinearTimeModel",
    "MicroBatchTimeModel",
    "ModePrediction",
    "PushPlan",
    "ReplicaLayout",
    "RolePlan",
    "SummationPlan",
    "TimeModelFit",
    "advise_roles",
    "apportion",
    "make_policy",
    "min_max_shares",
    "min_max_shares_linear",
    "plan_pushes",
    "plan_summation",
    "proportional_shares",
]
