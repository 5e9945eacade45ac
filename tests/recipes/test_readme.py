"""The README's example runs as it stands, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]


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


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", output)]


@pytest.mark.multi_process
def test_the_example_gives_the_same_losses_on_one_device_and_three(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (source,) = re.findall(r"```python\n(# train\.py.*?)```", README.read_text(), re.DOTALL)
    script.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    outputs = []
    for start in ([], ["-m", "keras_het", "run", "--speeds", "4,2,1"]):
        process = subprocess.run(
            [sys.executable, *start, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        outputs.append(process.stdout)
    one, three = map(losses, outputs)
    assert len(one) == 3
    assert three == pytest.approx(one, rel=1e-3)
