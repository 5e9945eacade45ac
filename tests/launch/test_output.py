"""The output of workers: split into lines, shown, and what it says of the one that failed first."""

import dataclasses
import io
import itertools
import os
import re
import sysconfig
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_het
from keras_het.launch.local.display import Display, WorkerLogs
from keras_het.launch.local.failure_report import describe_failures, save_output
from keras_het.launch.local.tracebacks import TracebackFilter, uncaught_error
from keras_het.launch.local.worker_process import OutputLine, WorkerResult, output_lines, strip_ansi


class Chunks(io.RawIOBase):
    def __init__(self, chunks):
        self.left = [chunk for chunk in chunks if chunk]

    def readable(self):
        return True

    def readinto(self, buffer):
        chunk = self.left.pop(0) if self.left else b""
        buffer[: len(chunk)] = chunk
        return len(chunk)


def split(*chunks):
    return [(line.text, line.is_final) for line in output_lines(Chunks(chunks))]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\nb\n", [("a", True), ("b", True)]),
        (b"a\n\nb", [("a", True), ("", True), ("b", True)]),
        (b"a\r\nb\r\n", [("a", True), ("b", True)]),
        (b"1%\r2%\r3%\n", [("1%", False), ("2%", False), ("3%", True)]),
        (b"\r1%\r2%", [("1%", False), ("2%", True)]),
        (b"1%\r2%\r", [("1%", False), ("2%", False), ("2%", True)]),
        (b"1%\r2%\r\r\n", [("1%", False), ("2%", False), ("2%", True)]),
        (b"\x08\x08\x08\r1/2\x08\x08\x08\r2/2\n", [("1/2", False), ("2/2", True)]),
        ("ä€\n".encode(), [("ä€", True)]),
        (b"\xff\n", [("\ufffd", True)]),
        (b"\xc3", [("\ufffd", True)]),
    ],
)
def test_known_outputs(data, expected):
    assert split(data) == expected
    assert split(*(bytes([byte]) for byte in data)) == expected


@given(st.text(alphabet="ab€\r\n\b", max_size=30), st.lists(st.integers(0, 60), max_size=5))
def test_cuts_do_not_matter(text, cuts):
    data = text.encode()
    edges = [0, *sorted(cuts), len(data)]
    assert split(*(data[a:b] for a, b in itertools.pairwise(edges))) == split(data)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


def final(text):
    return OutputLine(text, True)


def test_plain_output_has_prefixes_only():
    stdout, stderr = io.StringIO(), io.StringIO()
    display = Display(stdout, stderr)
    display.show(0, "stdout", final("\x1b[1m[bold] text\x1b[0m\t\x07" + "x" * 200))
    display.show(1, "stdout", OutputLine("50%", False))
    display.show(1, "stderr", final("warning"))
    display.say("one\ntwo")
    assert stdout.getvalue() == "[worker 0] [bold] text\t\x07" + "x" * 200 + "\n"
    assert stderr.getvalue() == "[worker 1] warning\n[keras-het] one\n[keras-het] two\n"


def test_only_chief():
    stdout = io.StringIO()
    display = Display(stdout, io.StringIO(), only_chief=True)
    display.show(1, "stdout", final("hidden"))
    display.show(0, "stdout", final("shown"))
    assert stdout.getvalue() == "[worker 0] shown\n"


def screen(text):
    """What a terminal shows: the erase sequence clears the line it is on."""
    lines = []
    for line in text.split("\n"):
        lines.append(strip_ansi(line.rpartition("\r\x1b[2K")[2]))
    return lines


def test_terminal_has_colours():
    stdout = Terminal()
    display = Display(stdout, Terminal())
    display.show(0, "stdout", final("text"))
    assert "\x1b[36m[worker 0] \x1b[0m" in stdout.getvalue()
    assert screen(stdout.getvalue()) == ["[worker 0] text", ""]


def test_terminal_redraws_progress_in_place():
    stdout = Terminal()
    display = Display(stdout, Terminal())
    display.show(0, "stdout", OutputLine("10%", False))
    display.show(0, "stdout", OutputLine("20%", False))
    assert screen(stdout.getvalue()) == ["[worker 0] 20%"]
    display.show(1, "stdout", final("between"))
    assert screen(stdout.getvalue()) == ["[worker 1] between", ""]
    display.show(0, "stdout", OutputLine("30%", False))
    display.show(0, "stdout", final("done"))
    assert screen(stdout.getvalue()) == ["[worker 1] between", "[worker 0] done", ""]


def test_terminal_cuts_progress_to_one_line():
    stdout = Terminal()
    Display(stdout, Terminal()).show(0, "stdout", OutputLine("x" * 100, False))
    (line,) = screen(stdout.getvalue())
    assert len(line) == 39
    assert line.endswith("…")


def test_a_closed_reader_does_not_stop_the_workers():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        stderr = io.StringIO()
        display = Display(stdout, stderr)
        display.show(0, "stdout", final("lost"))
        display.show(0, "stdout", final("lost as well"))
        display.show(0, "stderr", final("kept"))
    assert stderr.getvalue() == "[worker 0] kept\n"


def test_logs_have_no_colours_and_no_progress(tmp_path):
    with WorkerLogs(tmp_path, [0, 1], "EMULATION") as logs:
        logs.write(0, OutputLine("50%", False))
        logs.write(0, final("\x1b[1mdone\x1b[0m"))
        logs.write(1, final("other"))
    written = [(tmp_path / f"worker-{index}.log").read_text() for index in range(2)]
    assert written == ["EMULATION\ndone\n", "EMULATION\nother\n"]


PACKAGE = Path(keras_het.__file__).parent
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def lines(text):
    return textwrap.dedent(text).strip("\n").splitlines()


OWN = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 13, in <module>
        model.fit(x, callbacks=[Failing()])
      File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 122, in x
        raise e.with_traceback(filtered_tb) from None
      File "/home/me/train.py", line 6, in on_train_batch_end
        raise ValueError("my callback failed")
                         ^^^^^^^^^^^^^^^^^^^^
    ValueError: my callback failed
    """
)
LOST = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 13, in <module>
        model.fit(x)
    keras_het.strategy.cluster.peer_watch.WorkerLostError: Lost worker 1 (host:1)
    """
)
OF_A_GRAPH = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 9, in <module>
        model.fit(x)
    tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:

    Detected at node embedding/GatherV2 defined at (most recent call last):
      File "/home/me/train.py", line 9, in <module>

    indices[0,1] = 12 is not in [0, 10)
    \t [[{{node embedding/GatherV2}}]] [Op:__inference_one_step_on_iterator_123]
    """
)
# of an editable installation
IN_THE_LIBRARY = [
    *OWN[:3],
    f'  File "{PACKAGE / "strategy/cluster/agreement.py"}", line 101, in agree',
    "ValueError: The workers do not agree",
]
CHAINED = [
    *OWN,
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *lines(
        """
        Traceback (most recent call last):
          File "/tmp/__autograph_generated_file1x.py", line 2, in tf__step
        KeyError: 'rows'
        """
    ),
]


@pytest.mark.parametrize(
    ("output", "error", "place"),
    [
        (OWN, "ValueError: my callback failed", "/home/me/train.py:6"),
        (LOST, "WorkerLostError: Lost worker 1 (host:1)", "/home/me/train.py:13"),
        (
            OF_A_GRAPH,
            "InvalidArgumentError: Graph execution error: indices[0,1] = 12 is not in [0, 10)",
            "/home/me/train.py:9",
        ),
        (CHAINED, "KeyError: 'rows'", None),
        (["started", *LOST, "caught; on we go", *OWN], "ValueError: my callback failed", None),
        ([OWN[0], *OWN[1:3], "KeyboardInterrupt"], "KeyboardInterrupt", None),
        (IN_THE_LIBRARY, "ValueError: The workers do not agree", "/home/me/train.py:13"),
    ],
)
def test_the_error_that_ended_a_worker(output, error, place):
    found = uncaught_error(output)
    assert found is not None
    assert found.text == error
    if place is not None:
        assert found.place == place
        assert str(found) == f"{error} ({place})"


# Each as it was printed: its heading has where, and what has to be found. Long lists are shorter.
CAPTURED = [
    (heading.partition(": "), output)
    for each in (Path(__file__).parent / "captured_errors.txt").read_text().split("#" * 8)[1:]
    for heading, output in [each.strip(" ").replace("STDLIB", STANDARD_LIBRARY).split("\n", 1)]
]


@pytest.mark.parametrize(
    ("error", "output"), [pytest.param(h[2], output, id=h[0]) for h, output in CAPTURED]
)
def test_what_python_and_its_libraries_print(error, output):
    printed = [strip_ansi(line) for line in output.splitlines()]
    assert str(uncaught_error(printed)) == error
    assert shown(TracebackFilter(keep_logs=True), 0, printed) == printed
    # of another worker the error comes first, not the marks below a frame's source
    of_another = shown(TracebackFilter(keep_logs=True, shown=1), 0, printed)
    first = next((line for line in of_another if line.strip() and not line.startswith(" ")), "")
    assert not re.fullmatch(r"[~^]+", first), of_another


@pytest.mark.parametrize(
    ("code", "printed", "reason"),
    [
        (1, "no data in the folder\nGive --data", "exit code 1: Give --data"),
        (
            2,
            "usage: a.py [-h]\na.py: error: no such option\n",
            "exit code 2: a.py: error: no such option",
        ),
        (3, "", "exit code 3"),
        (
            -6,
            "terminate called after throwing an instance of 'std::runtime_error'\n  what(): no GPU",
            "killed by SIGABRT: what(): no GPU",
        ),
        (-6, "a: a.cc:4: int main(): Assertion `n==3' failed.\n", None),
        (-6, "free(): invalid pointer\nFatal Python error: Aborted\n\nThread 0x1:\n", None),
        (-6, "F0000 00:00:1.4   24 a.cc:5] Check failed: n >= 0 (0 vs. -1)\n  @ 0x7f  f()", None),
        (-11, "a warning\nFatal Python error: Segmentation fault\n", "killed by SIGSEGV"),
    ],
)
def test_a_worker_that_ends_without_a_traceback(code, printed, reason):
    failed = WorkerResult(0, code, False, 1.0, "", printed)
    reason = reason or f"killed by SIGABRT: {printed.splitlines()[0]}"
    assert describe_failures([failed], False) == f"worker 0 failed: {reason}"


@pytest.mark.parametrize("output", [[], ["nothing wrong"], OWN[:4]])
def test_no_error(output):
    assert uncaught_error(output) is None


def shown(tracebacks, worker, output):
    return [line for line in output if tracebacks.shows(worker, line)]


def test_frames_are_shown_of_the_first_worker_that_fails():
    tracebacks = TracebackFilter()
    assert shown(tracebacks, 1, ["before", *OWN, "after"]) == ["before", *OWN, "after"]
    assert shown(tracebacks, 0, LOST) == LOST[-1:]
    assert shown(tracebacks, 2, [*CHAINED, "after"]) == [OWN[-1], "", CHAINED[-1], "after"]
    assert shown(tracebacks, 1, OWN) == OWN, "the same worker may fail again"
    assert (tracebacks.shown, tracebacks.hidden) == (1, {0, 2})


def test_tracebacks_of_several_workers_do_not_mix():
    tracebacks = TracebackFilter()
    pairs = ((worker, line) for line in OWN for worker in (3, 1))
    seen = [(worker, line) for worker, line in pairs if tracebacks.shows(worker, line)]
    assert seen == [*((3, line) for line in OWN), (1, OWN[-1])]


def test_what_tensorflow_logs_of_its_start_is_hidden_unless_wanted():
    logged = [
        "I0000 00:00:1795642906.107   15351 port.cc:153] oneDNN custom operations are on.",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E0000 00:00:1795642667.204   16284 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE",
    ]
    kept = [
        "W0000 00:00:1795642667.204   16284 gpu_device.cc:2342] Cannot dlopen some GPU libraries.",
        "I1125 21:35:22.123456 140 train.py:12] a message of the user's",
    ]
    assert shown(TracebackFilter(), 0, logged + kept) == kept
    assert shown(TracebackFilter(keep_logs=True), 0, logged + kept) == logged + kept


FOLLOWS = "Another worker has received {}: all workers end here.\n"


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGTERM", -15), ("SIGINT", -2), ("SIGHUP", -1)]
)
@pytest.mark.parametrize("is_last", [True, False])
def test_the_worker_that_received_a_signal_is_named(name, code, is_last):
    """It may leave after the others, when the launcher is already ending all."""
    follows = FOLLOWS.format(name)
    # by the launcher's signal, if that came first
    asked = (
        WorkerResult(1, 143, True, 3.0, "", "")
        if is_last
        else WorkerResult(1, code, False, 1.0, "", "")
    )
    others = [
        WorkerResult(index, code, index == 2 or not is_last, 2.0, "", follows) for index in (0, 2)
    ]
    *effects, cause = describe_failures([others[0], asked, others[1]], False).splitlines()
    assert effects == ["worker 0 ended with it.", "worker 2 ended with it."]
    assert cause.startswith(f"worker 1 was ended by {name}, which keras-het did not send; ")
    assert "BackupAndRestore" in cause


def test_of_two_errors_the_first_is_the_cause():
    results = [
        WorkerResult(index, 1, False, 2.0 - index, "", "\n".join(output))
        for index, output in enumerate([OWN, CHAINED])
    ]
    effect, cause = describe_failures(results, False).splitlines()
    assert effect.startswith("worker 0 failed after it: ValueError: my callback failed (")
    assert cause == "worker 1 failed first: KeyError: 'rows'"


def test_other_errors_whose_frames_were_hidden_are_in_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = [
        WorkerResult(index, 1, False, float(index), "out", "\n".join(output))
        for index, output in enumerate([OWN, CHAINED, LOST, OWN, CHAINED])
    ]
    (said,) = save_output(results, {1, 2, 3})
    (path,) = tmp_path.glob("*/*")
    assert said == f"all that worker 1 printed: {path}"
    assert path.read_text().splitlines() == ["out", *CHAINED]


@pytest.mark.parametrize("code", [1, -15])
def test_an_error_goes_before_the_signal_that_follows_it(code):
    error = 'Traceback (most recent call last):\n  File "a.py", line 2, in f\nValueError: no rows\n'
    failed = WorkerResult(0, 1, False, 1.0, "", error, 0.5)
    failed = dataclasses.replace(failed, exit_code=code, was_ended=code < 0)
    ended = WorkerResult(1, 143, True, 2.0, "", "")
    *effects, cause = describe_failures([failed, ended], False).splitlines()
    assert effects == ["worker 1 was ended."]
    assert cause == "worker 0 failed first: ValueError: no rows (a.py:2)"
