"""What a row of benchmarks/hybrid.py says of trainings that do not reach the target."""

import importlib

import numpy as np
import pytest


@pytest.fixture
def hybrid():
    return importlib.import_module("hybrid")


def row_of(hybrid, *seconds):
    runs = [{"seconds": each, "samples_per_s": 1.0, "step_ms": 1.0} for each in seconds]
    row = hybrid._row("slow_link", "hybrid", runs, {"advised": "hybrid"})
    return row["fastest"], row["time_to_target"], row["slowest"]


def test_a_training_that_does_not_reach_the_target_is_the_slowest(hybrid):
    assert row_of(hybrid, 9.5, None, 13.5) == (9.5, 13.5, None)
    assert row_of(hybrid, 9.5, 12.0, 13.5) == (9.5, 12.0, 13.5)


def test_there_is_no_time_if_half_of_them_do_not(hybrid):
    assert row_of(hybrid, 9.5, None, None) == (9.5, None, None)


def test_advice_is_that_of_the_steps_that_roles_are_measured_in(hybrid, monkeypatch):
    seen = []

    class Task:
        def __init__(self, samples):
            assert samples >= 20 * 48

        def noise_scale(self, batch):
            return 1500.0

        def noise_scale_of_workers(self, *measured):
            seen.append(measured)
            return 700.0 + measured[-1]

    monkeypatch.setattr(hybrid, "NoisyTask", Task)
    monkeypatch.setattr(hybrid, "advised", lambda case, noise: f"{noise:g}")
    advice = hybrid.advices(hybrid.CASES["one_eighth"], 480)
    assert advice == {"advised": "1424", "advised_late": "1500"}  # what is measured counts double
    # steps 5 to 20, even shares, and the rate and momentum of the trainings
    assert seen == [([12] * 4, 4, 16, (0.01, 0.9), seed) for seed in range(25)]


def test_noise_scale_of_a_task_whose_gradient_is_known(hybrid, monkeypatch):
    task = importlib.import_module("_noisy_task")
    random = np.random.default_rng(0)

    def gradient(weights, inputs, labels):  # of mean 0.1 in 50 places, deviation 0.5 a sample
        return [np.full(50, 0.1) + random.normal(0, 0.5 / np.sqrt(len(labels)), 50)]

    monkeypatch.setattr(task, "_gradient", gradient)
    monkeypatch.setattr(task, "_first_weights", lambda random: [np.zeros(50)])
    small = task.NoisyTask(16 * 3010)
    found = small.noise_scale_of_workers([4, 12], 10, 3000, (0.01, 0.9), seed=1)
    assert found == pytest.approx(50 * 0.25 / 0.5, rel=0.1)
