"""What readings of the hardware change in a verdict, and what it says without them."""

import dataclasses
import re

import numpy as np
import pytest
from step_recordings import Fault, Training, repairs_of

from keras_het.planning.diagnosis.verdict import diagnose

BEGIN = 120
SLOW = Fault("compute", "temporary", 1.0, device=2, begin=BEGIN)
DEVICE, WORKER = [2], [2, 3]


def recording_of(kind="GPU", faults=(SLOW,), **settings):
    return Training(4, 170, kind=kind, faults=faults, **settings).record()


def with_readings(recording, columns, begin=BEGIN, **readings):
    """The same recording with other readings of some devices, from a step on."""
    hardware = dict(recording.hardware)
    for key, value in readings.items():
        name = key.replace("__", ".")
        hardware[name] = hardware[name].copy()
        rows = np.flatnonzero(recording.hardware_steps >= begin)
        hardware[name][np.ix_(rows, columns)] = value
    return dataclasses.replace(recording, hardware=hardware)


def kinds(recording):
    return [(cause.kind, cause.worker) for cause in diagnose(recording).causes]


@pytest.mark.parametrize(
    ("reasons", "word", "advice"),
    [
        (0x4, "its power limit", "power limit"),
        (0x8, "a hardware slow-down", "cooling"),
        (0x20, "heat", "cooling"),
        (0x40 | 0x8 | 0x4, "hardware", "cooling"),
        (0x80, "power brake", "power supply"),
        (0x0, "runs at 600 of 1400 MHz", "cooling"),
    ],
)
def test_a_throttled_device(reasons, word, advice):
    recording = with_readings(
        recording_of(),
        DEVICE,
        keras_het__gpu__clock=6e8,
        keras_het__gpu__throttle_reasons=reasons,
    )
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.device) == ("throttled_device", 2)
    assert word in cause.text and advice in cause.advice


def test_a_device_that_was_always_too_hot():
    recording = with_readings(
        recording_of(faults=(Fault("compute", size=1.0, device=2),)),
        DEVICE,
        begin=0,
        keras_het__gpu__clock=6e8,
        keras_het__gpu__throttle_reasons=0x40,
    )
    assert kinds(recording) == [("throttled_device", 1)]


@pytest.mark.parametrize("reasons", [0x1, 0x2, 0x3, 0x4])
def test_what_is_no_fault_is_none(reasons):
    undisturbed = recording_of(faults=())
    assert (
        kinds(with_readings(undisturbed, range(4), keras_het__gpu__throttle_reasons=reasons)) == []
    )
    slow = with_readings(recording_of(), DEVICE, keras_het__gpu__throttle_reasons=reasons & 0x3)
    assert kinds(slow) == [("slow_device", 1)]


def test_an_idle_device_lowers_its_clock_itself():
    recording = with_readings(
        recording_of(faults=(Fault("compute", size=1.0, device=0),)),
        [1, 2, 3],
        begin=0,
        keras_het__gpu__clock=4e8,
        hw__gpu__utilization=0.3,
    )
    assert kinds(recording) == [("slow_device", 0)]


def test_another_program_on_the_device():
    recording = with_readings(recording_of(), DEVICE, hw__gpu__memory__usage=11e9)
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.device) == ("other_program", 2)
    assert "19 % more of its memory" in cause.text


def test_another_program_that_keeps_the_device_busy():
    recording = with_readings(recording_of(), DEVICE, begin=0, hw__gpu__utilization=0.5)
    recording = with_readings(recording, DEVICE, hw__gpu__utilization=0.98)
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.device) == ("other_program", 2)
    assert "its utilization rose from 50 to 98 %" in cause.text


BUSY = {"process__cpu__usage": 4.0, "system__cpu__utilization": 0.98}
BOTH_SLOW = tuple(dataclasses.replace(SLOW, device=device) for device in WORKER)


def test_another_program_on_the_host():
    recording = with_readings(recording_of("CPU", BOTH_SLOW), WORKER, **BUSY)
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.worker) == ("other_program", 1)
    assert "98 % busy" in cause.text and "3.8 of its 8 CPUs" in cause.text


def test_one_cpu_is_one():
    quiet = {"process__cpu__usage": 0.1, "system__cpu__utilization": 0.1}
    recording = recording_of("CPU", BOTH_SLOW)
    recording = with_readings(recording, range(4), 0, keras_het__cpu__budget=1.0, **quiet)
    recording = with_readings(recording, WORKER, system__cpu__utilization=1.0)
    (cause,) = diagnose(recording).causes
    assert "at least 0.9 of its 1 CPU," in cause.text


def on_one_host(recording, workers):
    devices = tuple(
        dataclasses.replace(each, host="same") if each.worker in workers else each
        for each in recording.devices
    )
    return dataclasses.replace(recording, devices=devices)


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("shape", ["static", "temporary"])
def test_what_workers_have_in_common_makes_no_difference(shape, same_host):
    """A machine that other programs keep busy, and one slow device on it."""
    begin = 0 if shape == "static" else BEGIN
    fault = Fault("compute", shape, 2.7, device=1, begin=begin)
    recording = Training(2, 170, per_worker=1, kind="CPU", faults=(fault,)).record()
    if same_host:
        recording = on_one_host(recording, {0, 1})
    recording = with_readings(recording, range(2), 0, keras_het__cpu__budget=1.0)
    busy = {"process__cpu__usage": 0.05, "system__cpu__utilization": 0.99}
    recording = with_readings(recording, range(2), begin, **busy)
    verdict = diagnose(recording)
    (cause,) = verdict.causes
    assert (cause.kind, cause.device) == ("slow_device", 1)
    assert verdict.missing[0].startswith("no readings of single CPUs")
    assert re.search(r"3\.[67] times slower", cause.text) and "busy" not in cause.text


@pytest.mark.parametrize("shape", ["static", "temporary"])
def test_a_quota_that_all_have_makes_no_difference(shape):
    begin = 0 if shape == "static" else BEGIN
    fault = dataclasses.replace(SLOW, shape=shape, size=2.0, begin=begin)
    recording = recording_of("CPU", (fault,))
    recording = with_readings(recording, range(4), 0, keras_het__cpu__throttled=0.15)
    first = diagnose(recording).causes[0]
    assert (first.kind, first.device) == ("slow_device", 2)
    tighter = with_readings(recording, WORKER, begin, keras_het__cpu__throttled=0.6)
    assert diagnose(tighter).causes[0].kind == "slow_device"  # its sibling has the same quota


@pytest.mark.parametrize("shape", ["static", "temporary"])
def test_a_host_whose_workers_are_all_slow(shape):
    """Two of three workers share a host with other programs; luck makes one slower."""
    begin = 0 if shape == "static" else BEGIN
    faults = tuple(Fault("compute", shape, size, d, begin) for d, size in ((1, 1.0), (2, 1.6)))
    recording = Training(3, 170, per_worker=1, kind="CPU", faults=faults).record()
    recording = on_one_host(recording, {1, 2})
    recording = with_readings(recording, range(3), 0, keras_het__cpu__budget=2.0)
    busy = {"process__cpu__usage": 0.4, "system__cpu__utilization": 0.99}
    recording = with_readings(recording, [1, 2], begin, **busy)
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.worker) == ("other_program", 2)
    assert "like worker 1" in cause.text


@pytest.mark.parametrize("faulty", [(1,), (0, 1)])
def test_input_on_hosts_that_are_equally_busy(faulty):
    """Other programs explain that all workers wait for input, not that one does."""
    faults = tuple(Fault("input", size=1.0, device=device) for device in faulty)
    recording = Training(2, 170, per_worker=1, faults=faults).record()
    recording = with_readings(recording, range(2), begin=0, **BUSY)
    cause = diagnose(recording).causes[0]
    assert cause.kind == ("input" if len(faulty) == 1 else "other_program")
    assert cause.worker == 1 or len(faulty) == 2


@pytest.mark.parametrize("host", ["quiet", "busy", "served first", "contended"])
@pytest.mark.parametrize("shape", ["static", "temporary"])
@pytest.mark.parametrize("per_worker", [2, 1])
@pytest.mark.parametrize("phase", ["input", "other", "link", "compute"])
def test_what_all_workers_have(phase, per_worker, shape, host):
    """Nobody is slower than others, and a wait without work is no fault of other programs."""
    begin = 0 if shape == "static" else BEGIN
    on_each = range(0, 2, per_worker if phase in ("input", "other") else 1)
    faults = tuple(Fault(phase, shape, 1.0, d, begin) for d in on_each if phase != "link" or d == 0)
    recording = Training(2, 170, per_worker=per_worker, faults=faults).record()
    recording = on_one_host(recording, {0, 1})
    if host != "quiet":
        readings = {
            "process__cpu__usage": 0.05 if host == "busy" else 2.0,
            "system__cpu__utilization": 0.98,
            "keras_het__cpu__waiting": {"served first": 0.02, "contended": 0.8}.get(host, np.nan),
        }
        recording = with_readings(recording, range(2), 0, **readings)
    verdict = diagnose(recording)
    lacks_cpus = host == "contended" and phase != "link"
    if phase == "compute" and (not lacks_cpus or shape == "static"):
        assert verdict.causes == ()
        assert shape == "static" or "all devices are 2.0 times slower" in str(verdict)
        return
    (cause,) = verdict.causes
    assert cause.kind == ("other_program" if lacks_cpus else phase)
    assert lacks_cpus or not re.search(r"on worker|of worker", cause.advice), "all have it"
    if shape == "static" and phase != "compute":
        repaired = repairs_of(recording).by_phase["sync" if phase == "link" else phase]
        assert repaired < 0.17, "the table of what-ifs has it, too"


def test_workers_of_a_host_are_no_other_programs():
    """Both keep half of the CPUs busy."""
    recording = with_readings(on_one_host(recording_of("CPU"), {0, 1}), range(4), **BUSY)
    assert kinds(recording) == [("slow_device", 1)]


def test_a_smaller_budget():
    recording = recording_of("CPU", BOTH_SLOW)
    recording = with_readings(recording, WORKER, keras_het__cpu__budget=4.0)
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.worker) == ("host", 1)
    assert "4 CPUs instead of 8" in cause.text and "quota" in cause.advice


def test_input_that_lacks_cpus():
    recording = with_readings(
        recording_of(faults=(Fault("input", size=1.0, device=2),)),
        WORKER,
        begin=0,
        process__cpu__usage=7.9,
    )
    (cause,) = diagnose(recording).causes
    assert (cause.kind, cause.worker) == ("host", 1)
    assert "7.9 of its 8 CPUs" in cause.text and "more CPUs" in cause.advice


@pytest.mark.parametrize(
    ("kind", "fault", "missing"),
    [
        (
            "GPU",
            SLOW,
            "no clock readings of worker 1 GPU 0: cannot tell a throttled device from a slow one",
        ),
        (
            "CPU",
            SLOW,
            "no CPU readings of worker 1: cannot tell a lack of CPUs from a slow device",
        ),
        (
            "GPU",
            Fault("input", size=1.0, device=2),
            "no CPU readings of worker 1: cannot tell a lack of CPUs from a slow pipeline",
        ),
    ],
)
def test_what_readings_would_have_shown(kind, fault, missing):
    assert diagnose(recording_of(kind, (fault,))).missing == ()
    verdict = diagnose(recording_of(kind, (fault,), with_hardware=False))
    assert verdict.missing == (missing,)
    assert len(verdict.causes) == 1


def test_nothing_is_missing_where_nothing_is_wrong():
    assert diagnose(recording_of(faults=(), with_hardware=False)).missing == ()


def test_few_steps():
    assert diagnose(Training(2, 15).record()).missing == ("not enough steps yet: 13 of 20",)
    assert diagnose(Training(2, 0).record()).missing == ("not enough steps yet: 0 of 20",)
    assert diagnose(Training(2, 15).record()).lines == ()


def test_few_steps_since_a_change_of_shares():
    shares = np.tile([32, 32], (100, 1))
    shares[90:] = (48, 16)
    verdict = diagnose(Training(2, 100, shares=shares).record())
    assert verdict.missing == ("not enough steps since shares changed in step 90: 10 of 20",)


def test_a_device_without_times():
    recording = recording_of(faults=())
    compute = recording.compute.copy()
    compute[:, 1] = np.nan
    verdict = diagnose(dataclasses.replace(recording, compute=compute))
    assert verdict.missing == ("no compute times of worker 0 GPU 1",)
    compute[:] = np.nan
    verdict = diagnose(dataclasses.replace(recording, compute=compute))
    assert verdict.missing == ("no compute times: cannot tell devices apart",)


def test_what_no_reading_explains():
    """All devices become slower: that is the work, not a device."""
    faults = tuple(Fault("compute", "creeping", 1.0, device, 100) for device in range(4))
    verdict = diagnose(Training(4, 180, faults=faults).record())
    assert verdict.causes == () and verdict.lines == ()
    (missing,) = verdict.missing
    assert "all devices are 2.0 times slower" in missing
