"""`keras-het advise`: numbers that were computed by hand."""

import subprocess
import sys

import pytest

from keras_het.launch.command_line import main


def advise(capsys, *arguments):
    assert main(["advise", *arguments]) == 0
    return capsys.readouterr().out


def rows_of(text):
    """Time, gain and shares by the name of the row; all are of two devices."""
    lines = [line.split() for line in text.splitlines() if " + " in line and "Time" not in line]
    return {" ".join(words[:-5]): words[-5:] for words in lines}


def test_gains_equal_the_page(capsys):
    text = advise(capsys, "4,2,1")
    assert "1.75 times as fast as the fastest device alone" in text  # 7 / 4
    assert "2.33 times as fast as equal shares" in text  # 7 / (3 x 1)
    assert "batch" not in text and "little" not in text


def test_shares_are_whole_and_the_slowest_decides(capsys):
    rows = rows_of(advise(capsys, "24,11", "--batch", "64"))
    assert rows == {
        "balanced": ["1.833", "1.00", "44", "+", "20"],  # 44 / 24; 43 + 21 takes 21 / 11 = 1.909
        "equal shares": ["2.909", "1.59", "32", "+", "32"],  # 32 / 11
        "fastest alone": ["2.667", "1.45", "64", "+", "0"],  # 64 / 24
    }


def test_a_slow_link_takes_the_gain(capsys):
    link = ("--parameters", "25e6", "--link", "1Gbit")
    text = advise(capsys, "24,11", "--batch", "64", *link)
    assert "takes 0.8 s a step" in text  # 2 (2 - 1) / 2 x 100 MB at 125 MB/s
    rows = rows_of(text)
    assert rows["balanced"][:2] == ["2.633", "1.00"]
    assert rows["equal shares"][:2] == ["3.709", "1.41"]
    assert rows["fastest alone"][:2] == ["2.667", "1.01"]  # it sends nothing
    assert "A gain of 1.01 is little: use the fastest device alone" in text
    # 2 (3 - 1) / 3 x 100 MB at 1 GB/s
    assert "takes 0.133 s" in advise(capsys, "1,1,1", "--parameters", "25e6", "--link", "1GB/s")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["24"], "Expected the speeds of at least two devices. Received: 24."),
        (["24,11", "--link", "1Gbit"], "Give both, such as --parameters 25e6 --link 1Gbit."),
        (["24;11"], "expected positive numbers with commas, such as 4,2,1, received '24;11'"),
        (["2,1", "--link", "fast"], "expected a rate such as 1Gbit or 125MB, received 'fast'"),
        (["2,1", "--link", "1.2.3GB"], "expected a rate such as 1Gbit or 125MB, received"),
    ],
)
def test_mistakes_are_named(capsys, arguments, said):
    try:
        assert main(["advise", *arguments]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert said in capsys.readouterr().err


def test_tensorflow_is_not_imported():
    program = (
        "import sys; from keras_het.launch.command_line import main; main(['advise', '2,1'])\n"
        "print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
