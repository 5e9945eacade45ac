"""The command `keras-het doctor`: what is on this machine, what is wrong, and its fix."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from keras_het.launch.grammar import Commands, Option, add_command, add_options, not_negative

_DESCRIPTION = """\
Says what is on this machine, what keras_het would do with it, and what is wrong, with its fix:
TensorFlow and Keras, GPUs and their driver, CPUs and quotas, TF_CONFIG, and the links to the other
machines of TF_CONFIG. For these, run it on all of them at the same time, each with its own
TF_CONFIG, before training starts: each serves the others on its own address and measures what it
sends to them. That traffic is not encrypted.
"""
_EPILOG = """\
examples:
  keras-het doctor
  keras-het doctor --log-dir /data/logs --json > doctor.json
  TF_CONFIG=... keras-het doctor --wait-seconds 60      on each machine

Exit code: 1 if training would fail, else 0, also with warnings.
"""
_OPTIONS = (
    Option("--json", "print the report as JSON"),
    Option("--log-dir DIRECTORY", "where training will write: is there room", Path),
    Option(
        "--wait-seconds S",
        "how long to wait for the doctors of the other machines (default: 30; 0: only see whether "
        "their addresses can be reached)",
        not_negative,
        30.0,
    ),
)


def add_doctor_command(commands: Commands) -> None:
    summary = "say what is on this machine, what is wrong, and how to fix it"
    parser = add_command(commands, "doctor", run_doctor, summary, _DESCRIPTION, _EPILOG)
    add_options(parser, _OPTIONS)


def run_doctor(options: argparse.Namespace) -> int:
    # late: other commands need none of it
    from keras_het.launch.doctor.cluster_checks import other_tasks
    from keras_het.launch.doctor.examination import report_on, run_checks, show
    from keras_het.launch.doctor.facts import FAULT, gather
    from keras_het.launch.doctor.links import measure_links

    facts = gather(log_dir=options.log_dir)
    findings = run_checks(facts)
    # a node that cannot be reached itself would keep the others waiting for nothing
    can_serve = not any(f.level == FAULT and f.section == "Cluster" for f in findings)
    wait = options.wait_seconds if can_serve else 0.0
    if wait and (others := other_tasks(facts.cluster)):
        sys.stderr.write(f"Measuring links to {', '.join(others)}, for up to {wait:g} s ...\n")
    report = report_on(facts, findings, measure_links(facts, wait))
    if options.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2, default=str) + "\n")
    else:
        show(report, sys.stdout)
    return 1 if report.count(FAULT) else 0
