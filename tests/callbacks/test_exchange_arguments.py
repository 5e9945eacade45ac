"""Arguments that `HybridAggregation` and `LocalTraining` refuse."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_het
from keras_het.callbacks import HybridAggregation, LocalTraining
from keras_het.strategy.parameter_service import TopKWire
from keras_het.strategy.rules import AsyncSGD


@pytest.mark.parametrize("rule", ["streaming_diloco", "diloco", "sync_easgd"])
def test_rules_in_which_all_exchange_at_once_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="LocalTraining"):
        HybridAggregation(rule)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rule": "gossip"}, "gossip"),
        ({"period": 0}, "period must be a whole number"),
        ({"period": "often"}, 'or "auto"'),
        ({"period": "auto", "rule": "round_robin_easgd"}, 'period="auto" needs a rule'),
        ({"wire": TopKWire(0.1), "rule": "async_easgd"}, "would count as 0"),
        ({"async_batch_size": 2.5}, "async_batch_size must be"),
        ({"staleness_bound": -1}, "staleness_bound must be"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be more than 0"),
        ({"connect_seconds": -1.0}, "connect_seconds must be 0 or more"),
        ({"end_seconds": float("nan")}, "end_seconds must be 0 or more"),
        ({"measured_steps": 0}, "measured_steps must be from 1 to 256"),
        ({"measured_steps": 257}, "measured_steps must be from 1 to 256"),
        ({"noise_scale": -5.0}, "noise_scale must be samples above 0"),
        ({"on_service_loss": "panic"}, '"raise" or "continue"'),
        ({"service": "nowhere"}, '"auto" or "spread"'),
        ({"rule": AsyncSGD(0.1), "on_service_loss": "continue"}, "their own optimizer"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        HybridAggregation(**arguments)


@pytest.mark.parametrize("name", ["delta", "round_robin_easgd", "async_sgd"])
def test_asynchronous_rules_are_refused(name: str) -> None:
    config = {"learning_rate": 0.1} if name == "async_sgd" else {}
    with pytest.raises(ValueError, match="all workers exchange at once"):
        LocalTraining({"class_name": name, "config": config})


def test_one_worker_is_refused() -> None:
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a cluster of one"):
        model.fit(np.ones((16, 5)), np.ones((16, 1)), verbose=0, callbacks=[LocalTraining()])
