"""Workers that were started differently, or read another order, are told so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_het.planning import ReplicaLayout
from keras_het.strategy import agreement


@dataclasses.dataclass
class Cluster:
    """Stands for `HeterogeneousExtended`: what each of three workers contributes to a gather."""

    everyone: Callable[[np.ndarray], list[np.ndarray]]
    _local_device_type: str = "CPU"
    layout: ReplicaLayout = ReplicaLayout((1, 1, 1), 1)  # noqa: RUF009 - frozen

    def gather_over_workers(self, own: np.ndarray) -> np.ndarray:
        return np.concatenate(self.everyone(own))


def contribution_of(weights: list[float], device_type: str = "CPU") -> np.ndarray:
    sent: list[np.ndarray] = []

    def capture(own: np.ndarray) -> list[np.ndarray]:
        sent.append(own)
        return [own] * 3

    agreement.check_agreement(Cluster(capture, device_type), weights)
    return sent[0]


def test_equal_settings_agree() -> None:
    other = contribution_of([4, 2, 1])
    agreement.check_agreement(Cluster(lambda own: [own, other, own]), [4.0, 2.0, 1.0])


def test_different_shares() -> None:
    other = contribution_of([1, 1, 1])
    with pytest.raises(
        ValueError,
        match=r"different settings: share weights. This worker \(1\) has \[4.0, 2.0, 1.0\]; "
        r"worker\(s\) \[0, 2\] have something else",
    ):
        agreement.check_agreement(Cluster(lambda own: [other, own, other]), [4, 2, 1])


def test_different_device_types() -> None:
    other = contribution_of([1, 1, 1], "GPU")
    with pytest.raises(ValueError, match=r"type of device. This worker \(1\) has CPU; .*\[2\]"):
        agreement.check_agreement(Cluster(lambda own: [own, own, other]), [1, 1, 1])


def test_different_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    other = contribution_of([1, 1, 1])
    monkeypatch.setattr(agreement.keras, "__version__", "0.0")
    with pytest.raises(ValueError, match=r"versions. This worker \(1\) has .*Keras 0.0; .*\[0\]"):
        agreement.check_agreement(Cluster(lambda own: [other, own, own]), [1, 1, 1])


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    used: list[int] = []
    monkeypatch.setattr(keras.utils, "set_random_seed", used.append)
    monkeypatch.setattr(agreement, "_drawn_seeds", set())
    return used


def share_seed(monkeypatch: pytest.MonkeyPatch, own_is_set: bool, others_are_set: Any) -> None:
    monkeypatch.setattr(agreement.private_api, "global_seed", lambda: 5 if own_is_set else None)
    first, last = others_are_set
    everyone = [np.array([123, first]), np.array([456, last])]
    agreement.share_random_seed(Cluster(lambda own: [everyone[0], own, everyone[1]]))


def test_without_a_seed_all_take_the_one_of_the_chief(
    monkeypatch: pytest.MonkeyPatch, seeds: list[int]
) -> None:
    share_seed(monkeypatch, False, (0, 0))
    assert seeds == [123]


@pytest.mark.parametrize(("own", "others"), [(True, (1, 1)), (False, (0, 1)), (True, (0, 0))])
def test_a_seed_of_the_user_stays(
    monkeypatch: pytest.MonkeyPatch, seeds: list[int], own: bool, others: tuple[int, int]
) -> None:
    share_seed(monkeypatch, own, others)
    assert seeds == []


def test_the_drawn_seed_differs_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(agreement.private_api, "global_seed", lambda: 5)
    for _ in range(4):
        agreement.share_random_seed(Cluster(lambda own: [drawn.append(int(own[0])) or own] * 3))
    assert len(set(drawn)) > 1


def test_same_order_passes() -> None:
    agreement.check_same_order(Cluster(lambda own: [own, own, own]), -5)


def test_another_order_names_the_workers_that_differ_from_the_chief() -> None:
    chief = np.array([7], np.int64)
    with pytest.raises(ValueError, match=r"worker\(s\) \[1, 2\] differ from the chief. Give every"):
        agreement.check_same_order(Cluster(lambda own: [chief, own, own]), 8)


def test_tensorflow_tells_whether_a_seed_is_set() -> None:
    tf.random.set_seed(3)
    assert agreement.private_api.global_seed() is not None
    tf.random.set_seed(None)
    assert agreement.private_api.global_seed() is None
