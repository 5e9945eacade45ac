"""Rules about the repository that no other tool checks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import keras_het
from keras_het import seen_versions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keras_het"
FOLDERS = ("keras_het", "tests", "recipes", "benchmarks", "docs", ".ci")
TEXT_SUFFIXES = ("", ".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ".in", ".sh")
# Written so that no pattern matches its own text.
MACHINE_OR_REGISTRY = re.compile(
    r"(^|[^A-Za-z0-9_.])/(w[o]rk|r[o]ot)/|/bash_j[o]bs|index-u[r]l|pypi[.]org|pythonhosted[.]org"
    r"|https?://[^ ]*(/simp[l]e|/pack[a]ges/)"
)
# The only files that may import private symbols of TensorFlow and Keras.
ADAPTERS = [
    PACKAGE / name
    for name in (
        "private_api.py",
        "keras_graphs_adapter.py",
        "loader/iterator_adapter.py",
        "loader/tf_data_adapter.py",
    )
]
PRIVATE_MODULE = re.compile(r"^(tensorflow\.python|keras\.src)(\.[\w.]+)?$")


def repository_files() -> list[Path]:
    files = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT_SUFFIXES]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if path.suffix in TEXT_SUFFIXES and path.name != ".git")


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python file below {folder}"
    return files


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def asserts(source: str) -> list[str]:
    tree = ast.parse(source)
    return [f"line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def imports_beyond_numpy(source: str) -> list[str]:
    allowed = {*sys.stdlib_module_names, "numpy"}
    return [
        name
        for name in imported_modules(ast.parse(source))
        if name.split(".")[0] not in allowed and not name.startswith("keras_het.planning.")
    ]


def private_modules(source: str) -> list[str]:
    """Imports and, for dynamic ones, strings and attributes that name a private module."""
    tree = ast.parse(source)
    names = list(imported_modules(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
        elif isinstance(node, ast.Attribute):
            names.append(re.sub(r"^tf\.", "tensorflow.", ast.unparse(node)))
    return [name for name in names if PRIVATE_MODULE.match(name)]


def errors_that_nobody_learns_of(source: str) -> list[str]:
    """Handlers of any error that neither raise nor use it, and `suppress(Exception)`."""
    silent = re.findall(r"suppress\((?:Base)?Exception\)", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = "Exception" if node.type is None else ast.unparse(node.type)
            inside = list(ast.walk(node))
            uses = any(getattr(each, "id", "") == node.name for each in inside)
            if not uses and not any(isinstance(each, ast.Raise) for each in inside):
                silent += [caught] * (caught in ("Exception", "BaseException"))
    return silent


def loggers_of_another_name(source: str) -> list[str]:
    calls = re.findall(r"^.*getLogger\(.*$", source, re.MULTILINE)
    return [call for call in calls if call != "_logger = logging.getLogger(__name__)"]


CHECKS: list[tuple[Callable[[str], list[str]], str, str]] = [
    (asserts, "assert x\n", "x = 'assert x'\n"),
    (imports_beyond_numpy, "import tensorflow as tf\n", "import math\nimport numpy as np\n"),
    (
        imports_beyond_numpy,
        "from keras_het.loader import a\n",
        "from keras_het.planning.b import c",
    ),
    (imports_beyond_numpy, "from ..loader import a\n", "from collections.abc import Sequence\n"),
    (private_modules, "from tensorflow.python.eager import context\n", "import tensorflow as tf\n"),
    (private_modules, "from keras import src\n", "from keras import layers\n"),
    (private_modules, "import_module('keras.src.utils')\n", "x = 'see keras.src for details'\n"),
    (private_modules, "x = tf.python.eager\n", "x = tf.data\n"),
    *(
        (errors_that_nobody_learns_of, bad, f"try:\n    f()\n{good}\n")
        for bad, good in (
            ("with contextlib.suppress(Exception):\n    f()\n", "except OSError:\n    pass"),
            ("try:\n    f()\nexcept Exception:\n    g()\n", "except Exception as e:\n    g(e)"),
            ("try:\n    f()\nexcept:\n    g()\n", "except BaseException:\n    g()\n    raise"),
        )
    ),
    (
        loggers_of_another_name,
        '_logger = logging.getLogger("keras_het")\n',
        "_logger = logging.getLogger(__name__)\n",
    ),
]


@pytest.mark.parametrize(("check", "bad", "good"), CHECKS)
def test_each_check_finds_what_it_is_for(
    check: Callable[[str], list[str]], bad: str, good: str
) -> None:
    assert check(bad)
    assert not check(good)


def violations(check: Callable[[str], list[str]], files: list[Path]) -> dict[str, list[str]]:
    found = {str(path.relative_to(ROOT)): check(path.read_text("utf-8")) for path in files}
    return {path: problems for path, problems in found.items() if problems}


def test_the_package_has_no_assert_statement() -> None:
    assert violations(asserts, python_files(PACKAGE)) == {}


def test_no_error_is_ignored_without_a_line_of_the_log() -> None:
    assert violations(errors_that_nobody_learns_of, python_files(PACKAGE)) == {}


def test_each_module_has_a_logger_of_its_name() -> None:
    found = violations(loggers_of_another_name, python_files(PACKAGE))
    assert [path for path, calls in found.items() if calls] == ["keras_het/ray/group.py"]


def test_planning_imports_numpy_and_the_standard_library_only() -> None:
    assert violations(imports_beyond_numpy, python_files(PACKAGE / "planning")) == {}


def test_private_symbols_are_imported_in_one_place() -> None:
    assert len(violations(private_modules, ADAPTERS)) == len(ADAPTERS), "the search finds nothing"
    others = [path for path in python_files(PACKAGE) if path not in ADAPTERS]
    assert violations(private_modules, others) == {}


def test_no_python_file_is_over_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def machine_or_registry(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if MACHINE_OR_REGISTRY.search(line)]


@pytest.mark.parametrize(
    "line", ["cd /ro" + "ot/x", "https://py" + "pi.org/p", "pip --index" + "-url x"]
)
def test_machine_paths_and_registry_hosts_are_recognized(line: str) -> None:
    assert machine_or_registry(line)


def test_no_file_names_a_path_of_one_machine_or_a_registry() -> None:
    assert violations(machine_or_registry, repository_files()) == {}


def test_versions_agree() -> None:
    declared = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), flags=re.MULTILINE
    )
    assert declared is not None
    assert declared.group(1) == keras_het.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("## [Unreleased]")[2]
    assert re.search(
        rf"^(## \[|Planned as ){re.escape(keras_het.__version__)}\b", changes, re.MULTILINE
    )


def test_upper_bounds_are_those_that_a_warning_names() -> None:
    declared = (ROOT / "pyproject.toml").read_text("utf-8")
    for name, package in (("Keras", "keras"), ("TensorFlow", r"tensorflow(?:-cpu|\[and-cuda\])?")):
        bounds = re.findall(rf'"{package}>=[\d.]+,<(\d+)\.(\d+)', declared)
        assert {tuple(map(int, bound)) for bound in bounds} == {seen_versions.FIRST_UNSEEN[name]}
        assert not re.search(rf'"{package}>=[\d.]+["; ]', declared)


@pytest.mark.parametrize(
    ("keras_version", "tensorflow_version", "named"),
    [
        ("3.15.1", "2.21.0", ""),
        ("3.16.0.dev2026", "2.21.0", "Keras 3.16.0.dev2026 (seen: below 3.16). If"),
        ("3.16.0", "2.22.0-dev2026", "Keras 3.16.0 (seen: below 3.16) and TensorFlow 2.22.0-dev"),
    ],
)
def test_newer_versions_cause_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keras_version: str,
    tensorflow_version: str,
    named: str,
) -> None:
    for name, version in (("keras", keras_version), ("tensorflow", tensorflow_version)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    seen_versions.warn_of_unseen_versions.cache_clear()
    for _ in range(2):
        seen_versions.warn_of_unseen_versions()
    assert [named in record.getMessage() for record in caplog.records] == [True] * bool(named)


@pytest.mark.parametrize(
    ("name", "tensorflow"), [("constraints.txt", "2.21.0"), ("constraints-oldest.txt", "2.16.2")]
)
def test_constraints_pin_exact_versions(name: str, tensorflow: str) -> None:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    assert [line for line in lines if not re.match(r"^[\w.-]+==[\w.]+( ; .+)?$", line)] == []
    pins = [line.split(" ; ")[0] for line in lines]
    assert f"tensorflow-cpu=={tensorflow}" in pins
    assert f"tensorflow=={tensorflow}" in pins
    assert "keras==3.15.1" in pins


def test_this_run_uses_a_pinned_tensorflow() -> None:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("tensorflow-cpu", "tensorflow"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        assert installed in ("2.21.0", "2.16.2")
        return
    pytest.fail("neither tensorflow-cpu nor tensorflow is installed")


def test_the_wheel_holds_every_module_the_licence_and_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--no-build-isolation"]
    subprocess.run([*command, "--out-dir", tmp_path], cwd=ROOT, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"keras_het-{keras_het.__version__}.dist-info"
        assert "keras-het = keras_het.launch.command_line:main" in archive.read(
            f"{info}/entry_points.txt"
        ).decode("utf-8")
        assert "keras_het = keras_het.tensorboard.loader:HetLoader" in archive.read(
            f"{info}/entry_points.txt"
        ).decode("utf-8")
    assert {str(path.relative_to(ROOT)) for path in python_files(PACKAGE)} <= names
    page = [path for path in (PACKAGE / "tensorboard" / "static").iterdir() if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in page} <= names
    assert "keras_het/tensorboard/static/uPlot.LICENSE.txt" in names
    assert {"keras_het/py.typed", f"{info}/licenses/LICENSE"} <= names


@pytest.mark.full
@pytest.mark.multi_process
@pytest.mark.timeout(900)
def test_a_release_runs_the_readme_in_a_fresh_environment(tmp_path: Path) -> None:
    def run(*command: str | Path, cwd: Path = ROOT) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**environment, "PATH": f"{fresh / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    uv, fresh, home = (sys.executable, "-m", "uv"), tmp_path / "fresh", tmp_path / "home"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # the wheel is built from the source archive
    run(*uv, "build", "--quiet", "--no-build-isolation", "--out-dir", tmp_path)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "tests/test_packaging.py"} <= names

    run(*uv, "venv", "--quiet", "--python", sys.executable, fresh)
    install = (*uv, "pip", "install", "--quiet", "--python", fresh)
    pinned = ("--override", "overrides.txt", "--constraint", "constraints.txt")
    run(*install, *pinned, "--group", "cpu-build", wheel)
    readme = (ROOT / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(# train\.py.*?)```", readme, re.DOTALL)
    home.mkdir()
    (home / "train.py").write_text(example)
    alone, several = re.findall(
        r"^(python train\.py|keras-het run .*emulate.* train\.py)", readme, re.M
    )
    of_wheel = run(*alone.split(), cwd=home)

    run(*install, "--no-deps", "--reinstall", "--build-constraint", "constraints.txt", source)
    assert str(fresh) in run("python", "-c", "import keras_het as k; print(k.__file__)", cwd=home)
    of_source = run(*several.split(), cwd=home)
    losses = re.findall(r"loss: ([\d.]+)", of_wheel)
    assert len(losses) == 3 and re.findall(r"loss: ([\d.]+)", of_source) == losses
