"""Prints the test files to run for a change; `make test-changed` and `make test-rest` run them.

A change is what differs from the commit named by the variable BASE, or else what the commits of the
day before the newest one changed, and what is not committed. With --all the other test files
follow, and last those whose tests take minutes. The rest begins at another file after every commit,
so that runs that end early differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ("recipes/test_readme.py", "docs")
REPORT = ("telemetry/test_report.py", "launch/test_command_line.py")
EXACT = ("exactness", "multi_process/test_exact_across_workers.py")
# The longest beginning of a changed file's path decides.
TESTS_OF = {
    "keras_het/": (
        "fit",
        "strategy",
        "test_rooms.py",
        "test_packaging.py",
        "test_optional_parts.py",
    ),
    "keras_het/private_api.py": ("test_private_api.py", "test_private_graphs.py", "outside"),
    "keras_het/asynchronous/": (
        *("asynchronous", "callbacks/test_async_workers.py"),
        *(f"multi_process/test_{name}.py" for name in ("hybrid", "hybrid_faults", "role_choice")),
    ),
    "keras_het/callbacks/": ("callbacks", "multi_process/test_callbacks_across_workers.py"),
    "keras_het/callbacks/elastic_backup.py": ("callbacks/test_elastic_backup.py", "elastic"),
    "keras_het/fit/": ("fit", "callbacks"),
    "keras_het/launch/": ("launch",),
    "keras_het/launch/report_command.py": REPORT,
    "keras_het/launch/report_terminal.py": REPORT,
    "keras_het/launch/report_trace.py": REPORT,
    "keras_het/loader/": ("loader", "callbacks/test_loader_tuner.py"),
    "keras_het/loader/validation/": ("loader/validation", "docs/test_reference.py"),
    "keras_het/local_training/": (
        "callbacks/test_local_training_steps.py",
        "multi_process/test_local_training.py",
    ),
    "keras_het/planning/": ("planning",),
    "keras_het/ray/": ("elastic", "launch/test_run_on_ray.py"),
    "keras_het/strategy/": ("strategy", *EXACT),
    "keras_het/strategy/batches/": EXACT,
    "keras_het/strategy/cluster/": (
        "strategy",
        *(
            f"multi_process/test_{name}.py"
            for name in ("disagreements", "end_of_script", "lost_worker", "mistakes", "stop")
        ),
    ),
    "keras_het/strategy/exact/": EXACT,
    "keras_het/strategy/pipeline/": ("pipeline", "multi_process/test_pipeline_across_workers.py"),
    "keras_het/exchange/": (
        *("exchange", "summation", "asynchronous"),
        *("multi_process/test_hybrid.py", "multi_process/test_summation_across_workers.py"),
    ),
    "keras_het/summation/": (
        "summation",
        "multi_process/test_summation_across_workers.py",
        "multi_process/test_lost_worker.py",
    ),
    "keras_het/telemetry/": ("telemetry",),
    "keras_het/tensorboard/": ("tensorboard", "telemetry"),
    "benchmarks/": ("benchmarks",),
    "benchmarks/results/": ("docs/test_pages.py",),
    "docs/": README,
    "recipes/": ("recipes",),
    "Makefile": ("test_make.py", "test_changed.py"),
    "README.md": README,
    "pyproject.toml": ("test_packaging.py", "test_optional_parts.py"),
}


def tests_of(changed: Iterable[str]) -> list[str]:
    """Test files for paths that changed, each once, below the folder of tests."""
    found: dict[str, None] = {}
    for path in changed:
        folder, _, name = path.removeprefix("tests/").rpartition("/")
        if not path.startswith("tests/"):
            begins = [begin for begin in TESTS_OF if path.startswith(begin)]
            found.update(dict.fromkeys(TESTS_OF[max(begins, key=len)] if begins else ()))
        elif name.startswith("test_"):
            found[path.removeprefix("tests/")] = None
        elif folder and name.endswith(".py"):  # what its tests import
            found[folder] = None
    return list(dict.fromkeys(file for path in found for file in test_files(path)))


def test_files(path: str = "") -> list[str]:
    """The test files of a folder, or the file itself while it exists."""
    start = ROOT / "tests" / path
    files = start.rglob("test_*.py") if start.is_dir() else [start] if start.exists() else []
    return sorted(str(file.relative_to(ROOT / "tests")) for file in files)


def changed_files(base: str) -> list[str]:
    if base:
        committed = _git("diff", "--name-only", base, "HEAD")
    else:
        newest = _git("log", "-1", "--format=%ct") or ["0"]
        day_before = int(newest[0]) - 24 * 3600
        committed = _git("log", f"--since={day_before}", "--name-only", "--format=")
    status = _git("status", "--porcelain", "--untracked-files=all")
    return list(dict.fromkeys([*committed, *(line[3:] for line in status)]))


def rotated(files: list[str]) -> list[str]:
    """The same files; each commit begins far from where the one before began."""
    count = int((_git("rev-list", "--count", "HEAD") or ["0"])[0])
    start = count * 67 % max(len(files), 1)
    return files[start:] + files[:start]


def _git(*arguments: str) -> list[str]:
    """Lines that git prints; none outside of a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return [line for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def _takes_minutes(file: str) -> bool:
    return file.startswith(("benchmarks/", "elastic/", "outside/"))


def main(arguments: Sequence[str]) -> None:
    files = rotated(tests_of(changed_files(os.environ.get("BASE", ""))))
    if "--all" in arguments:
        files = sorted([*files, *rotated(test_files())], key=_takes_minutes)
    sys.stdout.write("".join(f"tests/{file}\n" for file in dict.fromkeys(files)))


if __name__ == "__main__":
    main(sys.argv[1:])
