"""Checks of Python's packages: TensorFlow, Keras, its backend, and the extras."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from keras_het import __version__
from keras_het.keras_backend import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.launch.doctor.facts import Facts
from keras_het.launch.doctor.findings import Finding, fault, note, ok, warning
from keras_het.seen_versions import FIRST_UNSEEN

_OLDEST = {"Keras": (3, 8), "TensorFlow": (2, 16)}
_TENSORBOARD_WITHOUT_IT = (2, 21)
_FOR = {
    "tensorboard": "to see recordings in TensorBoard",
    "prometheus": "to export metrics",
    "data-validation": "to validate data (Python 3.11 and TensorFlow 2.16 only)",
    "recipes": "for the scripts in recipes/",
}


def keras_backend(facts: Facts) -> Iterator[Finding]:
    """Whether Keras will run on TensorFlow."""
    chosen, place = _chosen_backend(facts)
    if chosen == NEEDED_BACKEND:
        yield ok(f"Keras runs on TensorFlow ({place}).")
        return
    yield fault(
        f"keras_het needs the TensorFlow backend of Keras. Received: {chosen!r} from {place}; "
        f"expected: {NEEDED_BACKEND!r}.",
        f"Set {KERAS_BACKEND}={NEEDED_BACKEND} in the environment of all workers, before keras is "
        "imported; it wins over keras.json.",
    )


def tensorflow_import(facts: Facts) -> Iterator[Finding]:
    """Whether TensorFlow and Keras can be imported."""
    found = facts.tensorflow
    if found is None:
        return
    if found.problem:
        yield fault(found.problem, found.fix)
        return
    cuda = f"built for CUDA {found.cuda}" if found.cuda else "built without CUDA"
    cudnn = f" and cuDNN {found.cudnn}" if found.cuda and found.cudnn else ""
    yield ok(
        f"keras_het {__version__}, TensorFlow {found.tensorflow} ({cuda}{cudnn}), Keras "
        f"{found.keras}."
    )


def versions(facts: Facts) -> Iterator[Finding]:
    """Whether the tests have seen these versions."""
    found = facts.tensorflow
    if found is None or found.problem:
        return
    for name, text in (("TensorFlow", found.tensorflow), ("Keras", found.keras)):
        version = _numbers(text)
        oldest, unseen = (".".join(map(str, bounds[name])) for bounds in (_OLDEST, FIRST_UNSEEN))
        expected = f"Received: {name} {text}; expected: from {oldest} to below {unseen}."
        if version < _OLDEST[name]:
            yield fault(f"{name} is too old. {expected}", "pip install --upgrade keras-het")
        elif version >= FIRST_UNSEEN[name]:
            yield warning(
                f"keras_het has not been tested with this version. {expected}",
                f"If training fails, or its numbers differ: pip install '{name.lower()}<{unseen}'",
            )


def extras(facts: Facts) -> Iterator[Finding]:
    """Which optional parts are installed."""
    installed = [f"{extra} {version}" for extra, version in facts.extras.items() if version]
    if installed:
        yield ok(f"Extras installed: {', '.join(installed)}.")
    board = facts.extras.get("tensorboard", "")
    if board and not facts.has_pkg_resources and _numbers(board) < _TENSORBOARD_WITHOUT_IT:
        yield warning(
            f"TensorBoard {board} cannot start: it imports pkg_resources, which the installed "
            "setuptools no longer provides.",
            "pip install 'setuptools<82'",
        )
    for extra, version in facts.extras.items():
        if not version:
            yield note(
                f"The extra {extra!r} is not installed: needed only {_FOR[extra]}.",
                f"pip install 'keras-het[{extra}]'",
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def emulation(facts: Facts) -> Iterator[Finding]:
    """Whether devices are slowed down on purpose."""
    if facts.environ.get("KERAS_HET_EMULATED_DEVICES"):
        yield warning(
            "KERAS_HET_EMULATED_DEVICES is set: this process's devices wait, to emulate others.",
            "Unset it to train at full speed; keras-het run --speeds sets it where it belongs.",
        )


def _chosen_backend(facts: Facts) -> tuple[str, str]:
    """The backend that Keras will choose, and what chooses it."""
    given = facts.environ.get(KERAS_BACKEND)
    if given:
        return given, KERAS_BACKEND
    home = facts.environ.get("KERAS_HOME") or Path(facts.environ.get("HOME") or "~") / ".keras"
    path = Path(os.path.expanduser(home)) / "keras.json"  # noqa: PTH111 - a text or a path
    try:
        chosen = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        chosen = None
    return (str(chosen), str(path)) if chosen else (NEEDED_BACKEND, "the default")
