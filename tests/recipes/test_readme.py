"""The README's example runs as it stands, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


RUN = ("-m", "keras_het", "run")


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", output)]


@pytest.mark.multi_process
@pytest.mark.quick("README.md")
@pytest.mark.parametrize(
    ("page", "speeds", "balanced"),
    [(README, "4,2,1", (40, 20, 10)), (REPOSITORY / "docs/index.md", "2,1", (40, 20))],
    ids=["README.md", "docs/index.md"],
)
def test_the_example_gives_the_same_losses_on_one_device_and_several(
    page: Path, speeds: str, balanced: tuple[int, ...], tmp_path: Path
) -> None:
    text = page.read_text()
    script = tmp_path / "train.py"
    (source,) = re.findall(r"```python\n(# train\.py.*?)```", text, re.DOTALL)
    script.write_text(source)
    assert f"keras-het run --emulate-speeds {speeds} train.py" in text
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def run(*start: str) -> str:
        process = subprocess.run(
            [sys.executable, *start, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    # beside each other, as starting takes longest; the measured times are those of emulated devices
    with ThreadPoolExecutor() as pool:
        outputs = list(
            pool.map(lambda start: run(*start), ([], [*RUN, "--emulate-speeds", speeds]))
        )
    one, several = map(losses, outputs)
    assert len(one) in (3, 4)
    assert several == pytest.approx(one, rel=1e-3)
    assert_balancing_pays(outputs[1], balanced)
    assert_is_shown(text, outputs[1])


def assert_is_shown(page: str, output: str) -> None:
    """A page shows lines of the output in their order; times and measured shares are its own."""
    start = r"```text\n((?:\[keras-het\].*?)?\[worker 0\] initial shares .*?)```"
    (shown,) = re.findall(start, page, re.DOTALL)
    lines = iter(output.splitlines())
    for line in shown.splitlines():
        if line != "...":
            changing = r"\d[\d.]*(?=(?:ms|s)\b| ->| ms)|(?<=shares )[\d ]+(?= \(min_max: prop)"
            parts = [re.escape(part) for part in re.split(changing, line)]
            pattern = re.compile(r"[\d. ]+".join(parts))
            assert any(pattern.fullmatch(each) for each in lines), line


def assert_balancing_pays(output: str, balanced: tuple[int, ...]) -> None:
    """By a plan that is shown: shares near those of the speeds, and a much shorter step.

    Beside other programs a device may look slower for a while, and another plan follows.
    """
    pattern = r"step \d+: shares ([\d ]+) \(min_max: .* ([\d.]+) -> ([\d.]+) ms"
    plans = re.findall(pattern, output)
    assert any(
        float(after) < 0.8 * float(before)
        and all(
            abs(int(share) - own) <= max(4, 0.2 * own)
            for share, own in zip(shares.split(), balanced, strict=True)
        )
        for shares, before, after in plans
    ), output
