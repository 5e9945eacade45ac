"""The report of a log: what the terminal and the trace show of the views, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from trace_format import check_trace
from written_logs import Fault, Training, balanced_recording, write_log

from keras_het.launch import report_trace as trace
from keras_het.launch.command_line import main
from keras_het.launch.report_terminal import change_text, console_for, number, plain, show
from keras_het.planning.diagnosis.recording import PHASES, Change, Device, Recording
from keras_het.planning.diagnosis.statistics import throughput
from keras_het.telemetry.event_log import read_log
from keras_het.telemetry.prometheus import PrometheusEndpoint
from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.log_content import LogContent


def content_of(recording, *exchanges):
    every = np.ones(len(recording.steps), np.int64)
    rows = np.stack([getattr(recording, name) for name in (*PHASES, "shares")], axis=1)
    return LogContent(recording, every, rows.astype(np.float32), exchanges)


@pytest.fixture(scope="module")
def balanced():
    exchanges = [
        {"worker": 2, "staleness": 3, "samples_per_second": 80.0, "step": 40},
        {"worker": 2, "staleness": 2, "exchange_seconds": 0.04, "step": 120},
        {"worker": "x", "staleness": "y", "step": 10},
    ]
    return content_of(balanced_recording(), *exchanges)


def shown(content, width=None):
    stream = io.StringIO()
    show("telemetry", content, console_for(stream, width))
    return stream.getvalue()


def row_of(text, place):
    """The numbers of a device in the table, without percentages."""
    lines = text.partition("Means of a step")[2].splitlines()
    line = next(each for each in lines if each.split()[:1] == [str(place)])
    line = re.sub(r"\([^)]*\)", "", line.partition("GPU")[2])
    return [each for each in line.split() if re.fullmatch(r"[0-9.]+|–", each)][-8:]


# the terminal


def test_devices_have_the_numbers_of_recent_steps(balanced):
    text, recording = shown(balanced), balanced.recording
    found = re.search(r"Means of a step \(steps (\d+) to (\d+)\)", text)
    assert found is not None
    rows = slice(int(found[1]), int(found[2]) + 1)
    for place in range(4):
        share, speed, *phases, best, _ = map(float, row_of(text, place))
        assert share == (48, 48, 16, 16)[place]
        expected = [1e3 * getattr(recording, name)[rows, place].mean() for name in PHASES]
        np.testing.assert_allclose(phases, expected, rtol=0.02)
        assert speed == pytest.approx(share / phases[0] * 1e3, rel=0.01)
        assert best == pytest.approx(1 if place < 2 else 1 / 3, rel=0.1)
    assert "8 of 16 GB" in text


def test_cpus_in_use_have_no_digits_that_nobody_needs():
    steps = len(balanced_recording().hardware_steps)
    used = {"process.cpu.usage": [0.0775, 1.314, 2.0, 31.4], "keras_het.cpu.budget": [1, 2, 8, 64]}
    hardware = {name: np.array([used[name]] * steps, float) for name in used}
    text = shown(content_of(dataclasses.replace(balanced_recording(), hardware=hardware)))
    for expected in ("0.08 of 1", "1.31 of 2", "2 of 8", "31.4 of 64"):
        assert f"CPUs in use: {expected}\n" in text


def test_the_terminal_says_it_all(balanced):
    text = shown(balanced)
    assert text.index("Add LoaderTuner on worker 0.") < text.index("What a step would take")
    assert re.search(r"\n  worker 0 not slow +\d+ ms +-\d+ %", text)
    assert re.search(r"\n  no waiting for input +\d+ ms +-[123]\d %", text)
    for part in (
        "4 replicas, 160 steps",
        "NVIDIA GeForce RTX 2080 Ti",
        "Balance: even shares would take",
        "step 40: shares 48 48 16 16 (min_max: in proportion to measured speeds)",
    ):
        assert part in text
    exchanges = text.partition("Async workers")[2]
    assert re.search(r"\n *2 +120 +– +2 +40 *\n *x +10 +– +– +– *\n", exchanges)


def test_balance_is_compared_with_even_shares(balanced):
    gain = views.diagnosis(balanced)["gain"]
    assert 1.3 < gain < 1.6
    assert f"{gain:.2f} times the samples/s" in shown(balanced)
    assert "Balance: shares are even." in shown(content_of(Training(steps=40).record()))
    worse = Training(steps=40, shares=(60, 20, 24, 24), noise=0.01).record()
    assert "even shares would be faster" in shown(content_of(worse))
    assert "Balance: " not in shown(content_of(Training(n=1, steps=40).record()))


def test_one_log_has_one_step_time(tmp_path):
    """By the wall clock, with stalls: in the tab, the report and Prometheus."""
    recording = Training(n=2, steps=90, per_worker=1, warm_up=False).record()
    other, waited = recording.other.copy(), recording.input.copy()
    other[[30, 60]] += 3.0  # a stall of everybody
    waited[80:] += 0.2
    recording = dataclasses.replace(
        recording, other=other, input=waited, pauses=((30, 1.5), (60, 2.5))
    )
    seconds, samples = recording.wall.mean(axis=1).sum(), recording.shares.sum()
    log = write_log(tmp_path, recording)
    for pause in recording.pauses:
        log.write_pause(*pause)
    log.close()
    (run,) = read_log(tmp_path)
    assert run.recording.pauses == recording.pauses
    tab, text = views.overview(run.content, run.content), shown(run.content)
    assert tab["step_seconds"] == pytest.approx(seconds / 90, rel=1e-5)
    median = np.median(recording.wall.mean(axis=1))
    assert tab["median_seconds"] == pytest.approx(median, rel=1e-2)
    assert tab["samples_per_second"] == pytest.approx(samples / seconds, rel=1e-5)
    assert f"{1e3 * seconds / 90:.0f} ms a step, stalls included (median " in text
    assert f"ms), {number(samples / seconds)} samples/s\n" in text
    latest = run.recording.between(40, 90)
    found = throughput(latest.wall, latest.samples).samples_per_second
    (metric,) = [m for m in metrics_of(run.recording) if m.name == "keras_het_samples_per_second"]
    assert metric.samples[0].value == pytest.approx(found)
    assert (tab["pauses"], tab["pause_seconds"]) == (2, pytest.approx(4.0))
    assert "Between epochs: 4 s in 2 pauses; no part of a step" in text


def metrics_of(recording):
    endpoint = PrometheusEndpoint(lambda: recording, 0, "127.0.0.1")
    try:
        return list(endpoint.collect())
    finally:
        endpoint.close()


def test_a_change_says_its_kind_once():
    assert change_text("shares", "shares 3 5 (min_max: x)") == "shares 3 5 (min_max: x)"
    assert change_text("loader", "2 threads") == "loader: 2 threads"


def test_a_narrow_terminal_is_not_overrun(balanced):
    lines = shown(balanced, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("compute" in line and "input" in line and "other" in line for line in lines)


def test_many_devices_are_those_that_cost_most():
    fault = Fault("compute", size=2.0, device=33)
    text = shown(content_of(Training(n=40, steps=60, faults=(fault,)).record()))
    assert "and 16 others; --html FILE shows all" in text
    assert "33  worker 16 GPU 1" in text
    places = re.findall(r"^ *(\d+)  worker", text, re.MULTILINE)
    assert len(places) == 24 and places == sorted(places, key=int)


def test_names_cannot_drive_the_terminal_or_the_encoding():
    assert plain("a\x1b[31mb\nc\u202ed\ud800") == "a\ufffd[31mb c\ufffdd\ufffd"
    assert plain("x" * 10_000) == "x" * 300 + "…"
    recording = Training(n=2, steps=30).record()
    evil = "\x1b]0;title\x07[bold]"
    devices = (Device(evil, 0, evil, evil, evil), Device("\ud800", 2**31 - 1))
    changes = (Change(5, evil, evil),)
    recording = dataclasses.replace(recording, devices=devices, changes=changes)
    text = shown(content_of(recording, {"worker": evil, "step": 3}))
    text.encode()
    assert "\x1b" not in text
    assert text.count("[bold]") >= 5  # no markup


# the trace


def written_trace(tmp_path, content):
    first = trace.write_trace(tmp_path / "trace.json", content)
    written = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    check_trace(written)
    return first, written["traceEvents"]


def test_a_trace_has_a_slice_for_each_phase(tmp_path, balanced):
    first, events = written_trace(tmp_path, balanced)
    assert first is None
    slices = [each for each in events if each["ph"] == "X"]
    recording = balanced.recording
    assert len(slices) == 4 * recording.compute.size
    total = sum(each["dur"] for each in slices if each["name"] == "compute")
    assert total == pytest.approx(recording.compute.sum() * 1e6, rel=1e-3)
    processes = {
        each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"
    }
    assert sorted(processes.values()) == ["training", "worker 0 (host0)", "worker 1 (host1)"]
    assert 0 not in processes
    threads = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    assert len(threads) == 4
    assert {(each["pid"], each["tid"]) for each in slices} == set(threads)
    (change,) = [each for each in events if each["ph"] == "i"]
    assert change["args"]["step"] == 40
    assert change["ts"] == min(each["ts"] for each in slices if each["args"]["step"] == 40)
    counters = Counter(each["name"] for each in events if each["ph"] == "C")
    assert counters["samples/s"] == 160
    assert counters["share worker 0 GPU 0"] == 2


def test_the_changes_of_a_trace_are_in_order(tmp_path, balanced):
    changes = tuple(Change(step, "shares", f"at {step}") for step in (120, 40, 41))
    recording = dataclasses.replace(balanced.recording, changes=changes)
    _, events = written_trace(tmp_path, content_of(recording))
    steps = [each["args"]["step"] for each in events if each["ph"] == "i"]
    assert steps == [40, 41, 120]


def test_a_long_trace_has_the_latest_steps(tmp_path, balanced, monkeypatch):
    monkeypatch.setattr(trace, "MOST_SLICES", 4 * 4 * 10)
    first, events = written_trace(tmp_path, balanced)
    assert first == 150
    assert {each["args"]["step"] for each in events if each["ph"] == "X"} == set(range(150, 160))


# odd recordings


def odd_recording(seed):
    """Whatever a log may hold: unknown, infinite, negative and huge values, few steps, gaps."""
    random = np.random.default_rng(seed)
    rows, n = int(random.choice([0, 1, 2, 19, 70])), int(random.choice([1, 2, 7]))

    def values(scale):
        result = scale * random.random((rows, n))
        odd = random.random((rows, n)) < random.choice([0.0, 0.05, 0.9])
        pool = random.choice([np.nan, np.inf, -1.0, 0.0, 3e38, 1e-30], size=(rows, n))
        result[odd] = pool[odd]
        if random.random() < 0.3 and n:
            result[:, random.integers(n)] = np.nan
        return result

    return Recording(
        tuple(Device(f"replica {index}", int(random.integers(-1, 3))) for index in range(n)),
        np.cumsum(random.integers(1, 1000, rows)),
        *(values(0.1) for _ in PHASES),
        values(32.0),
        hardware={"hw.power": values(300.0), "hw.gpu.utilization": values(1.0)},
        hardware_steps=np.arange(rows),
        changes=tuple(Change(int(random.integers(-5, 5000)), "", "") for _ in range(3)),
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.quick(*map(str, range(12)))
def test_whatever_is_in_a_recording_is_shown(seed, tmp_path):
    content = content_of(odd_recording(seed))
    assert not {"nan", "none", "inf"} & {*re.findall("[a-z]+", shown(content).lower())}
    written_trace(tmp_path, content)


def test_unknown_columns_are_dashes():
    recording = balanced_recording(60)
    compute = recording.compute.copy()
    compute[:, 1] = np.nan
    text = shown(content_of(dataclasses.replace(recording, compute=compute)))
    assert row_of(text, 1)[1:3] == ["–", "–"]
    assert "no compute times of worker 0 GPU 1" in text


# logs on disk


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    write_log(root / "second", Training(n=2, steps=30, seed=1).record()).close()
    log = write_log(root / "first", balanced_recording())
    log.write_async(120, worker=2, staleness=4, exchange_seconds=0.05)
    log.close()
    for path in (root / "second" / "telemetry").iterdir():
        os.utime(path, (1e9, 1e9))
    return root


def test_the_command_writes_all(log_dir, tmp_path, capsys):
    files = [tmp_path / "report.html", tmp_path / "trace.json"]
    options = ["--html", str(files[0]), "--trace", str(files[1])]
    assert main(["report", str(log_dir), *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("first/telemetry\n4 replicas, 160 steps")
    assert "Add LoaderTuner on worker 0." in out
    assert re.search(r"Async workers\n(.*\n)*? 2 +120 +– +4 +50 *\n", out)
    assert "Other trainings here: second/telemetry. Choose with --run NAME." in out
    assert f"Page: {files[0]}" in out
    assert files[0].read_text("utf-8").startswith("<!DOCTYPE html>")
    check_trace(json.loads(files[1].read_text()))


@pytest.mark.parametrize("name", ["second", "second/telemetry", "./second/"])
def test_a_training_is_chosen_by_its_name(log_dir, name, capsys):
    assert main(["report", str(log_dir), "--run", name]) == 0
    assert capsys.readouterr().out.startswith("second/telemetry\n2 replicas, 30 steps")


def test_a_log_of_one_step_says_so(tmp_path, capsys):
    write_log(tmp_path, Training(n=2, steps=1).record()).close()
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 replicas, 1 step: 5115 ms a step, stalls included (median 5115 ms)" in out
    assert "\nNo verdict: not enough steps yet: 1 of 20" in out


@pytest.mark.parametrize("lines", [["worker 1 is slow."], []])
def test_a_verdict_that_does_not_know_all_says_so(balanced, lines, monkeypatch):
    found = {**views.diagnosis(balanced), "verdict": lines, "missing": ["no clock of a GPU"]}
    monkeypatch.setattr(views, "diagnosis", lambda content: found)
    start = "The verdict does not know all" if lines else "No verdict"
    assert f"{start}: no clock of a GPU." in shown(balanced)


def event_file(folder):
    (path,) = (folder / "telemetry").iterdir()
    return path


def error(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return " ".join(captured.err.split())


def test_a_directory_without_a_log_is_refused_with_what_to_do(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    with tf.io.TFRecordWriter(str(tmp_path / "train" / "events.out.tfevents.1.host")) as writer:
        writer.write(b"")
    text = error(capsys, tmp_path)
    assert "There is no log of keras_het below" in text
    assert "1 event file there of other writers" in text
    assert "keras_het.callbacks.Telemetry(" in text


@pytest.mark.parametrize("size", [0, 40, 100])
def test_a_log_without_its_first_record_is_refused(tmp_path, size, capsys):
    write_log(tmp_path, Training(n=2, steps=10).record()).close()
    path = event_file(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    text = error(capsys, tmp_path)
    assert "The log in telemetry cannot be read: This log names no devices" in text
    assert "missing or torn" in text


def test_a_foreign_file_with_our_name_is_refused(tmp_path, capsys):
    name = f"{log_format.FILE_PREFIX}1{log_format.FILE_SUFFIX}"
    (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(5000))
    assert "cannot be read" in error(capsys, tmp_path)


def test_a_directory_that_is_not_there_is_refused_at_once(tmp_path):
    code = (
        "import sys\nfrom keras_het.launch.command_line import main\n"
        "print(main(['report', sys.argv[1]]), 'tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout == "2 False\n"
    assert "and there is nothing." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["{file}"], ["and there is a file"]),
        (
            ["{logs}", "--run", "third"],
            ["There is no training 'third'", "first/telemetry, second/telemetry"],
        ),
        (
            ["{logs}", "--html", "{folder}/none/report.html"],
            ["'{folder}/none/report.html', and there is no directory '{folder}/none': make it"],
        ),
        (
            ["{logs}", "--trace", "{folder}"],
            [
                "--trace needs the name of a file in a directory that exists. Received: ",
                "'{folder}', which is a directory: add a name of a file.",
            ],
        ),
    ],
    ids=["file", "run", "page", "trace"],
)
def test_what_is_not_there_is_refused(log_dir, tmp_path, capsys, arguments, texts):
    (tmp_path / "file").write_text("")
    names = {"file": tmp_path / "file", "logs": log_dir, "folder": tmp_path}
    told = error(capsys, *(each.format(**names) for each in arguments))
    assert all(text.format(**names) in told for text in texts), told


@pytest.mark.full
def test_a_closed_pipe_is_no_error(log_dir):
    command = [sys.executable, "-m", "keras_het", "report", str(log_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
