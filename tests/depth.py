"""How deep a run goes: `--quick` leaves tests out and draws few examples of property tests.

`make test` runs with it, `make test-all` without. Left out are tests marked `full`, and of those
marked `quick("id", ...)` all parameters but these. The run ends with what was left out.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

QUICK_EXAMPLES = 20
# A folder that only a full run has: the test suites of others.
FULL_FOLDERS = ("outside",)
LEFT_OUT = pytest.StashKey[Counter[str]]()
SUMMARY = pytest.StashKey[tuple[Any, list[str]]]()
STARTED = time.time()

settings.register_profile("full", deadline=None, max_examples=100)
# The same examples in every run: a check of a change must not fail for something else. One that
# fails is not made smaller, which takes minutes; a full run does that.
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=QUICK_EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)


def examples(number: int, quick: int = QUICK_EXAMPLES, **more: Any) -> settings:
    """Settings of a property test that draws so many examples, and few in a quick run."""
    is_quick = settings.default is settings.get_profile("quick")
    return settings(max_examples=min(number, quick) if is_quick else number, **more)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out what takes long, and draw fewer examples in property tests",
    )
    parser.addoption("--rest", action="store_true", help="run only what --quick leaves out")
    parser.addoption(
        "--minutes",
        type=float,
        help="skip tests that would begin so long after the start, or later",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    settings.load_profile("quick" if config.getoption("--quick") else "full")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Leaves out what a quick run does not have."""
    for item in items:
        if _room(item.nodeid) in FULL_FOLDERS or item.get_closest_marker("alone"):
            item.add_marker("full")
    if not any("::" in argument for argument in config.args):
        _check_names(items)  # before -k and -m leave tests out
    yield
    quick, rest = config.getoption("--quick"), config.getoption("--rest")
    if not (quick or rest):
        return
    left = [item for item in items if _is_quick(item) != quick]
    items[:] = [item for item in items if _is_quick(item) == quick]
    config.hook.pytest_deselected(items=left)
    left_out = config.stash[LEFT_OUT]
    left_out.update(_room(item.nodeid) for item in left)
    if hasattr(config, "workeroutput"):  # a process of xdist: read below
        config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets a run end in time, with whatever it has reached."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.time() - _started() > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes")


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("full"):
        return False
    chosen = item.get_closest_marker("quick")
    return not chosen or _parameters(item) in chosen.args


def _parameters(item: pytest.Item) -> str:
    _, _, parameters = item.name.partition("[")
    return parameters.removesuffix("]")


def _check_names(items: Iterable[pytest.Item]) -> None:
    """Refuses a name in `quick` that no parameters have: it would leave a test out for good."""
    wanted: dict[str, set[str]] = {}
    for item in items:
        if chosen := item.get_closest_marker("quick"):
            names = wanted.setdefault(item.nodeid.partition("[")[0], set(chosen.args))
            names.discard(_parameters(item))
    if unknown := {test: sorted(names) for test, names in wanted.items() if names}:
        raise pytest.UsageError(f"`quick` names parameters that these tests do not have: {unknown}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes what a process of xdist left out; each of them has collected everything."""
    left_out = getattr(node, "workeroutput", {}).get("left_out")
    if left_out:
        node.config.stash[LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Keeps for each room what ran, and what is left to a full run; said at the very end."""
    if not config.getoption("--quick"):
        return
    left_out = config.stash[LEFT_OUT]
    outcomes = {
        outcome: Counter(_rooms(terminalreporter.stats.get(outcome, ())))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    rooms = sorted({*left_out, *(room for counts in outcomes.values() for room in counts)})
    lines = [f"{'tests of':15}{''.join(f'{outcome:>9}' for outcome in outcomes)}{'left':>9}"]
    for room in rooms:
        counts = [*(counts[room] for counts in outcomes.values()), left_out[room]]
        lines.append(f"{room:15}{''.join(f'{count:>9}' for count in counts)}")
    minutes, seconds = divmod(round(time.time() - _started()), 60)
    lines += [
        f"Took {minutes} min {seconds} s. Left to make test-all: {sum(left_out.values())} tests,",
        "property tests at full depth, the oldest TensorFlow and data validation.",
    ]
    config.stash[SUMMARY] = terminalreporter, lines


def _started() -> float:
    """When the command began that runs these tests, in s of `time.time`."""
    return float(os.environ.get("STARTED", STARTED))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Comes after pytest's own closing line."""
    reporter, lines = config.stash.get(SUMMARY, (None, []))
    for line in lines:
        reporter.write_line(line)


def _rooms(reports: Iterable[Any]) -> list[str]:
    return [_room(report.nodeid) for report in reports if getattr(report, "when", "") != "teardown"]


def _room(nodeid: str) -> str:
    """The folder of a test, or its file where it is in none."""
    _, *folders, file = nodeid.split("::")[0].split("/")
    return folders[0] if folders else file.removesuffix(".py")
