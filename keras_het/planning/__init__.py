"""Pure decisions: who gets how much. Imports numpy and the standard library only."""

from keras_het.planning.balance import BalancePlan, BalancePolicy, make_policy
from keras_het.planning.bounded_shares import proportional_shares
from keras_het.planning.min_max import (
    min_max_shares,
    min_max_shares_linear,
    min_max_shares_of_models,
)
from keras_het.planning.overlapped_time_model import OverlappedTimeModel
from keras_het.planning.piecewise_time_model import PiecewiseLinearTimeModel
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import apportion
from keras_het.planning.time_model import LinearTimeModel, TimeModel
from keras_het.planning.time_model_fit import TimeModelFit

__all__ = [
    "BalancePlan",
    "BalancePolicy",
    "LinearTimeModel",
    "OverlappedTimeModel",
    "PiecewiseLinearTimeModel",
    "ReplicaLayout",
    "TimeModel",
    "TimeModelFit",
    "apportion",
    "make_policy",
    "min_max_shares",
    "min_max_shares_linear",
    "min_max_shares_of_models",
    "proportional_shares",
]
