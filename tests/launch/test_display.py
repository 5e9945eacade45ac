import io
import os

import pytest

from keras_het.launch.local.display import Display
from keras_het.launch.local.line_splitter import OutputLine, strip_ansi


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


def final(text: str) -> OutputLine:
    return OutputLine(text, True)


def test_plain_output_has_prefixes_only() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    display = Display(stdout, stderr)
    display.show(0, "stdout", final("\x1b[1m[bold] text\x1b[0m " + "x" * 200))
    display.show(1, "stdout", OutputLine("50%", False))
    display.show(1, "stderr", final("warning"))
    display.say("one\ntwo")
    assert stdout.getvalue() == "[worker 0] [bold] text " + "x" * 200 + "\n"
    assert stderr.getvalue() == "[worker 1] warning\n[keras-het] one\n[keras-het] two\n"


def test_tables_in_plain_output_keep_their_tabs() -> None:
    stdout = io.StringIO()
    Display(stdout, io.StringIO()).show(0, "stdout", final("a\tb\x0c\x07"))
    assert stdout.getvalue() == "[worker 0] a\tb\x0c\x07\n"


def test_only_chief() -> None:
    stdout = io.StringIO()
    display = Display(stdout, io.StringIO(), only_chief=True)
    display.show(1, "stdout", final("hidden"))
    display.show(0, "stdout", final("shown"))
    assert stdout.getvalue() == "[worker 0] shown\n"


def screen(text: str) -> list[str]:
    """What a terminal shows: the erase sequence clears the line it is on."""
    lines = []
    for line in text.split("\n"):
        lines.append(strip_ansi(line.rpartition("\r\x1b[2K")[2]))
    return lines


def test_terminal_has_colours() -> None:
    stdout = Terminal()
    display = Display(stdout, Terminal())
    display.show(0, "stdout", final("text"))
    assert "\x1b[36m[worker 0] \x1b[0m" in stdout.getvalue()
    assert screen(stdout.getvalue()) == ["[worker 0] text", ""]


def test_terminal_redraws_progress_in_place() -> None:
    stdout = Terminal()
    display = Display(stdout, Terminal())
    display.show(0, "stdout", OutputLine("10%", False))
    display.show(0, "stdout", OutputLine("20%", False))
    assert screen(stdout.getvalue()) == ["[worker 0] 20%"]
    display.show(1, "stdout", final("between"))
    assert screen(stdout.getvalue()) == ["[worker 1] between", "[worker 0] 20%"]
    display.show(0, "stdout", final("done"))
    assert screen(stdout.getvalue()) == ["[worker 1] between", "[worker 0] done", ""]


def test_terminal_cuts_progress_to_one_line() -> None:
    stdout = Terminal()
    Display(stdout, Terminal()).show(0, "stdout", OutputLine("x" * 100, False))
    (line,) = screen(stdout.getvalue())
    assert len(line) == 39
    assert line.endswith("…")


def test_a_closed_reader_does_not_stop_the_workers() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        stderr = io.StringIO()
        display = Display(stdout, stderr)
        display.show(0, "stdout", final("lost"))
        display.show(0, "stdout", final("lost as well"))
        display.show(0, "stderr", final("kept"))
    assert stderr.getvalue() == "[worker 0] kept\n"
