"""A callback brings what it needs, and not what the others need."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from keras_het import callbacks
from keras_het.callbacks.loader_tuner import LoaderTuner

LIST_MODULES = """
import sys
import keras_het
keras_het.callbacks.LoaderTuner
print(*(name for name in sys.modules if name.startswith("keras_het.")))
"""


@pytest.mark.full
def test_the_loader_tuner_brings_no_parameter_service() -> None:
    run = [sys.executable, "-c", LIST_MODULES]
    loaded = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "keras_het.callbacks.loader_tuner" in loaded.split()
    unneeded = ("keras_het.asynchronous.exchange", "keras_het.rules")
    assert not [name for name in loaded.split() if name.startswith(unneeded)]


def test_every_name_is_the_class_of_its_module() -> None:
    assert callbacks.LoaderTuner is LoaderTuner
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
    assert dir(callbacks) == sorted(callbacks.__all__)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"keras_het\.callbacks.*LoaderTunr"):
        callbacks.LoaderTunr  # noqa: B018


@pytest.mark.parametrize("name", sorted({*callbacks.__all__} - {"DataValidation"}))
def test_a_tuner_can_copy_a_callback_before_each_fit(name: str, tmp_path: Path) -> None:
    kind = getattr(callbacks, name)
    callback = kind(str(tmp_path)) if name in ("BackupAndRestore", "ElasticBackup") else kind()
    copied = copy.deepcopy(callback)
    assert type(copied) is kind and vars(copied).keys() == vars(callback).keys()
