"""Every valid recording gets a verdict, whatever its numbers."""

import dataclasses

import numpy as np
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from step_recordings import (
    Fault,
    Training,
    devices_of,
    gain_of,
    repairs_of,
    scores_of,
)

from keras_het.planning.diagnosis.recording import HARDWARE, Change, Recording
from keras_het.planning.diagnosis.verdict import diagnose

KINDS = {
    *("slow_device", "throttled_device", "input", "host"),
    *("other_program", "link", "shares", "other"),
}
NUMBERS = st.one_of(
    st.floats(0, 10),
    st.sampled_from([0.0, 1.0, np.nan, np.inf, -1e-9, -1.0, 1e300, 5e-324]),
)


@st.composite
def recordings(draw):
    n, rows, samples = draw(st.integers(0, 4)), draw(st.integers(0, 40)), draw(st.integers(0, 3))

    def table(height, elements=NUMBERS):
        return draw(arrays.arrays(np.float64, (height, n), elements=elements))

    numbers = draw(arrays.arrays(np.int64, rows, elements=st.integers(0, 1000)))
    counts = st.sampled_from([0.0, 1.0, 2.0, 32.0, np.nan])
    names = draw(st.lists(st.sampled_from(list(HARDWARE)), max_size=4, unique=True))
    kinds = draw(st.lists(st.sampled_from(["shares", "loader", "x"]), max_size=2))
    return Recording(
        devices_of(n, draw(st.integers(1, 2)), draw(st.sampled_from(["CPU", "GPU"]))),
        np.sort(numbers),
        *(table(rows) for _ in range(4)),
        table(rows, draw(st.sampled_from([counts, NUMBERS, st.just(8.0)]))),
        hardware={name: table(samples) for name in names},
        hardware_steps=np.arange(samples),
        changes=tuple(Change(3, kind, "") for kind in kinds),
    )


def check(recording):
    verdict = diagnose(recording)
    assert len(verdict.lines) <= 3
    for cause in verdict.causes:
        assert cause.kind in KINDS and 0 <= cause.share_of_step <= 1
        assert "nan" not in f"{cause.text} {cause.advice}"
        assert all(0 <= device < len(recording.devices) for device in cause.devices)
    result = repairs_of(recording)
    assert len(result.by_device) == len(recording.devices)
    for values in scores_of(recording):
        assert not ((values < 0) | (values > 1)).any()
    gain_of(recording)


@examples(200)
@given(recordings())
def test_anything(recording):
    check(recording)


@examples(150)
@given(
    st.integers(1, 5),
    st.integers(20, 90),
    st.integers(0, 10**6),
    st.floats(0, 0.7),
    st.sampled_from(["compute", "input", "host", "link"]),
    st.booleans(),
)
def test_faults_with_holes(n, steps, seed, holes, kind, zero_shares):
    fault = Fault(kind, "creeping", 2.0, n - 1, steps // 2)
    recording = Training(n, steps, seed=seed, faults=(fault,)).record()
    random = np.random.default_rng(seed)
    names = ("compute", "input", "sync", "other", "shares")
    changed = {name: getattr(recording, name).copy() for name in names}
    for values in changed.values():
        values[random.random(values.shape) < holes] = np.nan
    if zero_shares:
        changed["shares"][random.random(steps) < 0.3] = 0
        changed["shares"][:, 0] = 0
    check(dataclasses.replace(recording, **changed))
