"""What is a name and what belongs to a path, in the arguments of `keras-het validate`."""

from pathlib import Path

import pytest

from keras_het.launch.validate_command import _name_and_path


@pytest.mark.parametrize(
    "path",
    [
        "data/date=2024-01-01/train-*.tfrecord",
        "gs://bucket/date=2024-01-01/train.tfrecord",
        "date=1/train-*.tfrecord",
        "date=1",
    ],
)
def test_equals_signs_of_a_path_give_no_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "date=1"
    folder.mkdir()
    (folder / "train-0.tfrecord").touch()
    assert _name_and_path(path)[1:] == (path, False)
    assert _name_and_path(f"fast={path}") == ("fast", path, True)
