"""Buckets that travel during the backward pass need no other shares.

Bucket k of worker i is computed at :math:`c_i + s_i b_i \\varphi_k`; its all-reduce begins when all
have computed it and the bucket before has arrived. As all compute the same layers in the same
order, the fractions are the same for all: shares with equal computing times make the last worker
early for each bucket. Only unequal fixed costs c_i make a difference.
"""

import itertools

import numpy as np
import pytest

from keras_het.planning.balance.min_max import min_max_shares_linear

RUNS, TOTAL = 200, 24


def step_time(fixed, slopes, shares, fractions, travel):
    computed = (np.array(fixed) + np.array(slopes) * shares)[:, None]
    ready = np.array(fixed)[:, None] + (computed - np.array(fixed)[:, None]) * fractions
    arrived = 0.0
    for bucket, own in enumerate(travel):
        arrived = max(arrived, ready[:, bucket].max()) + own
    return max(arrived, computed.max())


def all_shares():
    return [
        np.array([*pair, TOTAL - sum(pair)])
        for pair in itertools.product(range(1, TOTAL), repeat=2)
        if sum(pair) < TOTAL
    ]


@pytest.mark.full  # a property of the problem, not of what solves it
@pytest.mark.parametrize("largest_cost", [0.0, 1.0])
def test_shares_that_compute_equally_long_are_the_best(largest_cost):
    random = np.random.default_rng(0)
    for _ in range(RUNS):
        fixed = random.uniform(0, largest_cost, 3)
        slopes = random.uniform(0.2, 2, 3)
        fractions = np.sort(random.uniform(0.3, 1, 4))
        fractions[-1] = 1.0
        travel = random.uniform(0, 6, 4)
        candidates = all_shares()
        least = min_max_shares_linear(fixed, slopes, TOTAL, lower=[1] * 3)
        times = [step_time(fixed, slopes, shares, fractions, travel) for shares in candidates]
        ours = step_time(fixed, slopes, least, fractions, travel)
        assert ours <= min(times) + (1 - fractions[0]) * np.ptp(fixed) + 1e-9
