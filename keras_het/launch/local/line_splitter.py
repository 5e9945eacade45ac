"""Conversion of a worker's output from bytes to lines, with progress bars recognised."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_LINE_END = re.compile(r"\r\n|\n|\r(?!\n)")


@dataclass(frozen=True)
class OutputLine:
    r"""One line, or one state of a line that is still being redrawn."""

    text: str
    is_final: bool


class LineSplitter:
    r"""Splitter of a stream of UTF-8 bytes at `\n`, `\r\n` and `\r`.

    A terminal shows only the last of several texts separated by `\r`; to keep progress bars
    readable in files, every earlier one is marked as not final. Backspaces are dropped: Keras
    prints them only to go back to the start of the line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""
        self._redrawn = ""

    def feed(self, data: bytes) -> Iterator[OutputLine]:
        """Yield the lines that `data` completes."""
        self._pending += self._decoder.decode(data)
        position = 0
        for end in _LINE_END.finditer(self._pending):
            # The `\n` of a `\r\n` may still be on its way.
            if end.group() == "\r" and end.end() == len(self._pending):
                break
            yield from self._line(self._pending[position : end.start()], end.group() != "\r")
            position = end.end()
        self._pending = self._pending[position:]

    def finish(self) -> Iterator[OutputLine]:
        """Yield the remainder at the end of the stream."""
        rest = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        if rest or self._redrawn:
            yield from self._line(rest.removesuffix("\r"), True)

    def _line(self, text: str, is_final: bool) -> Iterator[OutputLine]:
        text = text.replace("\b", "")
        # `\r\n` at the end of a progress bar: the text on the screen is the last state.
        shown = text or self._redrawn
        self._redrawn = "" if is_final else shown
        if is_final or text:
            yield OutputLine(shown, is_final)


def strip_ansi(text: str) -> str:
    """Return the text without terminal control sequences such as colours."""
    return _CONTROL_SEQUENCE.sub("", text)
