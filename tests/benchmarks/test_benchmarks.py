"""Every benchmark runs in its short form and writes the fields it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# What the first row of each has; further parts of a benchmark may have other fields.
FIELDS = {
    "data": {"policy", "mode", "throughput_ratio", "map_calls_ratio"},
    "balance": {
        "policy",
        "samples_per_s",
        "ratio_to_limit",
        "speedup_over_even",
        "steps_to_balance",
        "plan_changes_after_balance",
    },
    "learned_shares": {"policy", "ratio_to_sum", "standard_error"},
    "loader": {
        "policy",
        "steps_per_s",
        "idle_fraction",
        "ratio_to_autotune",
        "ratio_to_oracle",
        "peak_rss_mb",
    },
    "easgd": {"speedup", "communication_share_before", "communication_share_after"},
    "elastic": {"trainer", "seconds_without_progress", "goodput"},
    "loader_jobs": {"policy", "throughput_ratio_to_even", "makespan", "makespan_ratio_to_even"},
    "push_periods": {"exchange", "period", "num_reached", "time_to_target"},
    "rules": {"rule", "time_to_target", "last_accuracy", "ratio_to_sgd"},
    "local_training": {"mode", "of_sum_of_speeds", "goodput", "loss_ratio"},
    "overlap": {"mode", "step_ms", "bound_ms", "ratio_to_bound", "ratio_to_ddp"},
    "parameter_service": {
        "gb_per_s",
        "ratio_to_socket",
        "ratio_to_remote_variables",
        "ratio_to_echo",
    },
    "hybrid": {
        "mode",
        "time_to_target",
        "samples_per_s",
        "ratio_to_best_other",
        "advised",
        "advised_late",
    },
    "hybrid_faults": {"step_ms", "step_ms_p99", "long_steps", "ratio", "num_steps"},
    "pipeline": {
        "mode",
        "ratio_to_data_parallel",
        "predicted_step_ms",
        "measured_step_ms",
        "peak_mb",
        "plan",
    },
    "solver": {"mode", "milliseconds", "optimal"},
    "summation": {
        "n",
        "k",
        "bytes_ratio",
        "speedup_over_allreduce",
        "speedup_over_ps",
        "predicted_speedup",
    },
    "input_wait_meter": {"added_microseconds", "part_of_1_ms"},
    "telemetry": {"step_time_ratio", "control_ratio", "bytes_per_replica_and_step"},
    "overhead": {"mode", "step_time_ratio", "lowest_ratio", "highest_ratio"},
    "steps_per_execution": {"gain", "stock_gain", "gain_ratio", "step_milliseconds", "load"},
    "verdict": {"named", "kind_said", "steps_needed", "alarms_before", "other_cpus"},
}


def test_every_benchmark_is_listed():
    names = {path.stem for path in FOLDER.glob("[a-z]*.py")}
    assert names == FIELDS.keys()


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", FIELDS)
def test_form(name, tmp_path):
    if name == "elastic":
        pytest.importorskip("ray", reason="needs Ray: the extra `ray`")
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--quick", "--json", path],
        capture_output=True,
        text=True,
        timeout=600,  # beside other tests, several times as long as alone
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert report["environment"].keys() >= {"python", "cpus"}
    assert report["rows"][0].keys() >= FIELDS[name]
    for row in report["rows"]:
        assert row["case"]
        measured = {key: value for key, value in row.items() if "ratio" in key or "_per_s" in key}
        assert measured or "skipped" in row or row.keys() - {"case", "policy"}
        assert all(value is None or value > 0 for value in measured.values()), row
