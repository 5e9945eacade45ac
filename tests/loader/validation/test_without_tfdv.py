"""What a user sees who has not installed TensorFlow Data Validation."""

import builtins
import sys
from typing import Any

import pytest

import keras_het.loader
from keras_het.callbacks import DataValidation
from keras_het.launch.command_line import main

INSTALL = r'uv pip install "tensorflow-data-validation==1\.16\.1" "tensorflow==2\.16\.2" dill'


@pytest.fixture(autouse=True)
def without_tfdv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("keras_het.loader.validation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(keras_het.loader, "validation", raising=False)
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "tensorflow_data_validation":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)


def test_the_import_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=INSTALL) as caught:
        import keras_het.loader.validation  # noqa: F401
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}, tensorflow"
    assert version in str(caught.value)
    assert "No module named 'tensorflow_data_validation'" in str(caught.value)
    assert caught.value.name == "tensorflow_data_validation"


def test_so_does_the_callback() -> None:
    with pytest.raises(ImportError, match=INSTALL):
        DataValidation(schema="schema.pbtxt")


def test_so_does_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "data.tfrecord"]) == 2
    assert "uv pip install" in capsys.readouterr().err
