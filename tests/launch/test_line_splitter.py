import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.launch.local.line_splitter import LineSplitter, OutputLine, strip_ansi


def split(*chunks: bytes) -> list[tuple[str, bool]]:
    splitter = LineSplitter()
    lines: list[OutputLine] = []
    for chunk in chunks:
        lines += splitter.feed(chunk)
    lines += splitter.finish()
    return [(line.text, line.is_final) for line in lines]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\nb\n", [("a", True), ("b", True)]),
        (b"a\n\nb", [("a", True), ("", True), ("b", True)]),
        (b"a\r\nb\r\n", [("a", True), ("b", True)]),
        (b"1%\r2%\r3%\n", [("1%", False), ("2%", False), ("3%", True)]),
        (b"\r1%\r2%", [("1%", False), ("2%", True)]),
        (b"1%\r2%\r", [("1%", False), ("2%", True)]),
        (b"1%\r2%\r\r\n", [("1%", False), ("2%", False), ("2%", True)]),
        (b"\x08\x08\x08\r1/2\x08\x08\x08\r2/2\n", [("1/2", False), ("2/2", True)]),
        ("ä€\n".encode(), [("ä€", True)]),
        (b"\xff\n", [("\ufffd", True)]),
        (b"\xc3", [("\ufffd", True)]),
    ],
)
def test_known_outputs(data: bytes, expected: list[tuple[str, bool]]) -> None:
    assert split(data) == expected
    assert split(*(bytes([byte]) for byte in data)) == expected


@given(
    st.text(alphabet="ab€\r\n\b", max_size=30),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_cuts_do_not_matter(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(cuts), len(data)]
    assert split(*(data[a:b] for a, b in itertools.pairwise(edges))) == split(data)


@given(st.lists(st.text(alphabet="ab ", max_size=5), max_size=5))
def test_plain_lines_come_back(lines: list[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    assert split(data) == [(line, True) for line in lines]


def test_strip_ansi() -> None:
    assert strip_ansi("\x1b[1m10/10\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m\x1b[0m [x]") == "10/10 ━━ [x]"
