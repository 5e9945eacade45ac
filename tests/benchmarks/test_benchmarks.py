"""Every benchmark runs in its short form and writes the fields it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FIELDS = {
    "data": {"policy", "mode", "throughput_ratio", "map_calls_ratio"},
    "balance": {"policy"},
    "parameter_service": {"gb_per_s", "ratio_to_socket", "ratio_to_remote_variables"},
    "solver": set(),
    "overhead": {"mode", "step_time_ratio", "lowest_ratio", "highest_ratio"},
}


def test_every_benchmark_is_listed():
    names = {path.stem for path in FOLDER.glob("[a-z]*.py")}
    assert names == FIELDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_form(name, tmp_path):
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--quick", "--json", path],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert report["environment"].keys() >= {"python", "tensorflow", "keras", "cpus"}
    assert report["rows"]
    for row in report["rows"]:
        assert row.keys() >= {"case", *FIELDS[name]}
        ratios = [value for key, value in row.items() if key.endswith("ratio")]
        assert any(ratios)
        assert all(value is None or value > 0 for value in ratios)
