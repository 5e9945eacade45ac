"""Backups take a fiftieth of the time, or what interruptions demand."""

import pytest

import keras_het
from keras_het.fit import resume
from keras_het.fit.resume import BackupInterval


class Clock:
    """Seconds as `time` returns them."""

    now = 0.0

    def time(self):
        return self.now

    monotonic = time


@pytest.mark.parametrize(
    ("cost", "step", "interruptions", "seconds", "expected_steps"),
    [
        (0.1, 0.5, 0, 600.0, 10),
        (0.001, 0.01, 0, 600.0, 100),
        (2.0, 200.0, 0, 600.0, 1),
        (0.0, 0.5, 0, 600.0, 2),
        (0.4, 0.5, 10, 600.0, 14),  # sqrt(2 * 0.4 * 60) = 6.9 s, not 20
        (0.4, 0.5, 1, 600.0, 40),  # sqrt(480) = 21.9 s: not rarer than without
        (0.0078125, 0.5, 600, 600.0, 2),  # once a second, at most
        (0.0, 0.5, 3, 600.0, 2),
    ],
)
def test_steps_until_the_next_backup(
    cost,
    step,
    interruptions,
    seconds,
    expected_steps,
    monkeypatch,
    logical_devices,
):
    clock = Clock()
    monkeypatch.setattr(resume, "time", clock)
    interval = BackupInterval()
    interval.begin()
    if interruptions:
        began = clock.now + 4 * step + cost - seconds
        interval.resume({"began": began, "interruptions": interruptions - 1})
    for _ in range(4):
        interval.count_step()
    clock.now += 4 * step + cost
    strategy = keras_het.HeterogeneousStrategy(logical_devices[:1])
    assert interval.next_after(cost, strategy) == expected_steps
