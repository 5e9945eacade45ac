"""Would a learned policy choose better shares for local training than measured speeds do?

    python benchmarks/learned_shares.py [--json FILE] [--quick]

A simulation, in NumPy only: workers of unlike speed train for periods of equally many samples, and
a period lasts until the last worker is done. Policies see the samples and seconds of past periods:

* `even`: equal shares.
* `measured`: `balanced_shares`, what `LocalTraining(..., balance=True)` does.
* `mean of 2`: the same, of the speeds of the last two periods, unless they differ by more than 1.6.
* `learned`: a network of 8 hidden units that corrects the last measured speed by the three before
  (Orchestra 2022 trains a policy on a simulator, too), by evolution strategies on other seeds.
* `oracle`: knows the speeds of the period to come, but for their noise: no policy can do better.

`ratio_to_sum` is the samples per second, over the sum of the speeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from _report import environment, print_table, write_report

from keras_het.local_training.local_steps import balanced_shares

NUM_WORKERS, SAMPLES, PERIODS, HISTORY, HIDDEN = 3, 864, 60, 4, 8
SCENARIOS = ("steady", "slow-downs", "throttling")
POLICIES = ("even", "measured", "mean of 2", "learned", "oracle")
NOISE = (0.02, 0.2)
"""Standard deviation of the logarithm of a period's speed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds: form, not numbers")
    options = parser.parse_args()
    rounds, tests = (3, 4) if options.quick else (600, 400)
    rows = list[dict[str, Any]]()
    for scenario in SCENARIOS:
        for noise in NOISE:
            weights = trained(scenario, noise, rounds)
            speeds = speeds_of(scenario, np.random.default_rng(1), tests)
            for policy in POLICIES:
                ratios = np.concatenate(
                    [
                        simulated(each[None], noise, policy, seed, weights[None])
                        for seed, each in enumerate(speeds)
                    ]
                )
                rows.append(
                    {
                        "case": f"{scenario}, noise {noise:.0%}",
                        "policy": policy,
                        "ratio_to_sum": round(float(ratios.mean()), 4),
                        "standard_error": round(float(ratios.std() / np.sqrt(tests)), 4),
                    }
                )
    print_table(rows, list(rows[0]))
    write_report("learned_shares", rows, options.json, environment())


def speeds_of(scenario: str, random: np.random.Generator, number: int) -> np.ndarray:
    """Return samples per second [number, PERIODS, NUM_WORKERS]."""
    size = (number, 1, NUM_WORKERS)
    speeds = np.exp(random.uniform(0, np.log(8), size)) * np.ones((1, PERIODS, 1))
    periods = np.arange(PERIODS)[None, :, None]
    if scenario == "slow-downs":  # a third of the speed, for 5 to 15 periods
        begin, lasts = random.integers(5, PERIODS, size), random.integers(5, 16, size)
        speeds = np.where((periods >= begin) & (periods < begin + lasts), speeds / 3, speeds)
    elif scenario == "throttling":  # as a device grows warm and cools
        depth, phase = random.uniform(0, 0.4, size), random.uniform(0, 2 * np.pi, size)
        speeds = speeds * (1 - depth * (1 + np.sin(periods / 6 + phase)) / 2)
    return speeds


def simulated(
    speeds: np.ndarray, noise: float, policy: str, seed: int, weights: np.ndarray
) -> np.ndarray:
    """Return the ratio to the sum of speeds of each run [number]; `weights` has a row for each."""
    random = np.random.default_rng([7, seed])
    number = len(speeds)
    shares = np.full((number, NUM_WORKERS), 1 / NUM_WORKERS)
    seen = np.zeros((number, 0, NUM_WORKERS))
    took = np.zeros(number)
    for period in range(PERIODS):
        now = speeds[:, period]
        if policy == "oracle":
            shares = now / now.sum(1, keepdims=True)
        samples = np.maximum(np.round(shares * SAMPLES), 1.0)
        seconds = samples / (now * np.exp(noise * random.normal(size=now.shape)))
        took += seconds.max(1)
        seen = np.concatenate([seen, np.log(samples / seconds)[:, None]], 1)[:, -HISTORY:]
        if policy in ("measured", "mean of 2"):
            usual = seconds
            if policy == "mean of 2" and period:
                is_alike = np.abs(seen[:, -1] - seen[:, -2]) < np.log(1.6)
                usual = samples / np.exp(np.where(is_alike, seen[:, -2:].mean(1), seen[:, -1]))
            for run, own in enumerate(shares):
                found = balanced_shares(samples[run], usual[run], own)
                shares[run] = own if found is None else found
        elif policy == "learned":
            shares = np.exp(predicted(weights, seen))
        shares = shares / shares.sum(1, keepdims=True)
    return PERIODS * SAMPLES / took / speeds.sum(2).mean(1)


def predicted(weights: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the logarithm of the speed to come [number, NUM_WORKERS]."""
    last = seen[:, -1:]
    missing = np.repeat(seen[:, :1], HISTORY - seen.shape[1], 1)
    before = np.concatenate([missing, seen], 1)[:, :-1] - last
    inputs = np.concatenate([before, np.ones_like(last)], 1)  # [number, HISTORY, NUM_WORKERS]
    size = HISTORY * HIDDEN
    into = weights[:, :size].reshape(-1, HIDDEN, HISTORY)
    hidden = np.tanh(into @ inputs)
    linear = weights[:, size + HIDDEN :, None] * before
    return last[:, 0] + (weights[:, size : size + HIDDEN, None] * hidden).sum(1) + linear.sum(1)


def trained(scenario: str, noise: float, rounds: int, pairs: int = 32) -> np.ndarray:
    """Return the weights that evolution strategies find: antithetic, ranked, with momentum."""
    random = np.random.default_rng(0)
    size = HISTORY * HIDDEN + HIDDEN + HISTORY - 1
    mean, moment = 0.3 * random.normal(size=size), np.zeros(size)
    mean[HISTORY * HIDDEN :] = 0.0  # at first the last speed is the prediction
    best, best_score = mean, -np.inf
    check = speeds_of(scenario, np.random.default_rng(2), 256)
    for number in range(rounds):
        steps = random.normal(size=(pairs, size))
        weights = np.concatenate([mean + 0.1 * steps, mean - 0.1 * steps])
        found = np.zeros(2 * pairs)
        for run in speeds_of(scenario, random, 4):
            runs = np.repeat(run[None], 2 * pairs, 0)
            found += simulated(runs, noise, "learned", 10**6 + number, weights)
        ranks = np.argsort(np.argsort(found)) / (2 * pairs - 1) - 0.5
        moment = 0.9 * moment + 0.1 * (ranks[:pairs] - ranks[pairs:]) @ steps / pairs
        mean = mean + 0.2 * moment
        if number % 20 == 0 or number == rounds - 1:
            repeated = np.repeat(mean[None], len(check), 0)
            score = float(simulated(check, noise, "learned", 10**9, repeated).mean())
            if score > best_score:
                best, best_score = mean, score
    return best


if __name__ == "__main__":
    main()
