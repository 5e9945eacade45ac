"""The secret that all tasks share, and the fingerprint of what they must agree on."""

import pytest

from keras_het.exchange.secret import model_fingerprint, read_secret


def test_fingerprint_depends_on_everything():
    given = (["a", "b"], [(2, 3), (4,)], ["float32"] * 2, "delta")
    others = [
        (["a", "c"], *given[1:]),
        (given[0], [(3, 2), (4,)], *given[2:]),
        (*given[:2], ["float32", "float16"], given[3]),
        (*given[:3], "async_sgd"),
    ]
    assert len({model_fingerprint(*each) for each in (given, *others)}) == 5


def test_secret(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    file = {"KERAS_HET_SECRET_FILE": str(tmp_path / "secret")}
    text = {"KERAS_HET_SECRET": "0123456789abcdef"}
    assert read_secret(file) == read_secret(text) == b"0123456789abcdef"
    for environ, match in (({}, "neither"), ({**file, **text}, "both")):
        with pytest.raises(ValueError, match=match):
            read_secret(environ)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        read_secret({"KERAS_HET_SECRET": "short"})
