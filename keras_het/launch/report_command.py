"""The command `keras-het report`: the story of a training, from its log."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from keras_het.launch.grammar import Commands, Option, add_command, add_options
from keras_het.launch.local.display import discard, printable

_DESCRIPTION = """\
Reads the log of a training and says which device is slow and why, where the time of a step goes,
what it would take without each trouble, and what balancing has gained. LOGDIR is the directory that
keras_het.callbacks.Telemetry was given, or one above several of them.
"""
_EPILOG = """\
examples:
  keras-het report logs
  keras-het report logs --html report.html
  keras-het report logs --run second --trace trace.json     open it in https://ui.perfetto.dev
"""
_OPTIONS = (
    Option("--html FILE", "write the page of TensorBoard's tab with the log in it", Path),
    Option("--trace FILE", "write a trace that Perfetto opens", Path),
    Option("--run NAME", "which training, of several (default: the latest one)"),
)


def add_report_command(commands: Commands) -> None:
    summary = "tell the story of a training from its log"
    parser = add_command(commands, "report", run_report, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("log_dir", metavar="LOGDIR", help="directory of the log")
    add_options(parser, _OPTIONS)


def run_report(options: argparse.Namespace) -> int:
    for option, path in (("--html", options.html), ("--trace", options.trace)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            what = "which is a directory: add a name of a file"
            if not path.is_dir():
                what = f"and there is no directory {str(path.parent)!r}: make it first"
            raise ValueError(
                f"{option} needs the name of a file in a directory that exists. Received: "
                f"{str(path)!r}, {what}."
            )
    # of a remote one only TensorFlow knows
    if "://" not in options.log_dir and not Path(options.log_dir).is_dir():
        what = "a file" if Path(options.log_dir).exists() else "nothing"
        raise FileNotFoundError(
            f"LOGDIR must be the directory that Telemetry(log_dir) was given. Received: "
            f"{options.log_dir!r}, and there is {what}."
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # nothing is computed here, and TensorFlow says at each import that it is on
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # TensorFlow, which reads remote logs too, takes seconds to import
    from keras_het.launch.report_terminal import choose_run, console_for, listed, show
    from keras_het.launch.report_trace import write_trace
    from keras_het.tensorboard.report_page import report_page

    run, others = choose_run(options.log_dir, options.run)
    notes = []
    if others:
        notes.append(f"Other trainings here: {listed(others)}. Choose with --run NAME.")
    if options.html:
        options.html.write_text(report_page(run.name, run.content), encoding="utf-8")
        notes.append(f"Page: {options.html}")
    if options.trace:
        first = write_trace(options.trace, run.content)
        part = f", from step {first} on" if first is not None else ""
        notes.append(f"Trace{part}: {options.trace} (https://ui.perfetto.dev opens it)")
    console = console_for(sys.stdout)
    with console.capture() as captured:
        show(run.name, run.content, console)
    text = captured.get() + "".join(f"\n{note}" for note in notes) + ("\n" if notes else "")
    try:
        sys.stdout.write(printable(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # | head: all that was asked for was shown
        discard(sys.stdout)
    return 0
