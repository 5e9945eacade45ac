"""What all workers must agree on before the first step."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api

_ONE_DEVICE_TYPE = (
    " A collective group has one type of device: a machine without GPU beside machines with GPUs "
    'joins as a summation machine (job "summation") or as an async worker (job "async").'
)


def check_agreement(extended: Any, weights: Sequence[float], aggregation: object = None) -> None:
    """Compares the set-up of all workers.

    Args:
        extended: the strategy's `HeterogeneousExtended`.
        weights: this worker's share weights.
        aggregation: settings of the summation, None without one.

    Raises:
        ValueError: on every worker, if one of them was started differently.
    """
    described = {
        "share weights": str([float(weight) for weight in weights]),
        "type of device": extended._local_device_type,
        "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
        "aggregation": repr(aggregation),
    }
    own = np.array([_hash(text) for text in described.values()], np.int64)
    everyone = extended.gather_over_workers(own).reshape(-1, len(own))
    for column, (what, text) in enumerate(described.items()):
        different = np.flatnonzero(everyone[:, column] != own[column])
        if len(different):
            raise ValueError(
                f"The workers were started with different settings: {what}. This worker "
                f"({extended.layout.worker_index}) has {text}; worker(s) {different.tolist()} have "
                "something else. Start all workers with the same script, arguments and versions."
                + (_ONE_DEVICE_TYPE if what == "type of device" else "")
            )


_drawn_seeds: set[int] = set()


def seed_was_drawn() -> bool:
    """Tells whether TensorFlow's global seed is one that all workers were given, not the user's."""
    return private_api.global_seed() in _drawn_seeds


def share_random_seed(extended: Any) -> None:
    """Gives all workers one random seed if the user has set none.

    An unseeded shuffle would put the samples in another order on every worker. The chief draws the
    seed, so that two runs still differ.

    Args:
        extended: the strategy's `HeterogeneousExtended`.
    """
    drawn = np.array([secrets.randbelow(2**31)], np.int64)
    is_users = private_api.global_seed() is not None and not seed_was_drawn()
    is_set = np.array([is_users], np.int64)
    seeds = extended.gather_over_workers(np.concatenate([drawn, is_set])).reshape(-1, 2)
    if not seeds[:, 1].any():
        keras.utils.set_random_seed(int(seeds[0, 0]))
        _drawn_seeds.add(int(seeds[0, 0]))


def check_same_order(extended: Any, fingerprint: int) -> None:
    """Compares the order of the samples that the workers are about to read.

    Args:
        extended: the strategy's `HeterogeneousExtended`.
        fingerprint: hash of the first global batch of the epoch.

    Raises:
        ValueError: on every worker, if one of them has another order.
    """
    everyone = extended.gather_over_workers(np.array([fingerprint], np.int64))
    different = np.flatnonzero(everyone != everyone[0])
    if len(different):
        raise ValueError(
            "The workers read the samples in different orders, so that some would be used twice "
            f"and others never: worker(s) {different.tolist()} differ from the chief. Give every "
            "worker the same data and the same random seed, for example "
            "keras.utils.set_random_seed(42) at the start of the script, and do not draw random "
            "numbers on one worker only."
        )


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
