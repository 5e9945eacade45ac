"""A report for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_het.launch.doctor.examination import Report
from keras_het.launch.doctor.findings import FAULT, NOTE, OK, WARNING, Finding

_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAULT: "bold red"}
_NO_END = 100_000
"""Width of lines that something else than a terminal reads: none is broken."""


def show(report: Report, stream: TextIO) -> None:
    """Print a report, in colour and in lines that fit on a terminal."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = _NO_END
    with console.capture() as rendered:
        _print(report, console)
    # cells are filled with spaces up to the width of their column
    text = "\n".join(line.rstrip() for line in rendered.get().splitlines()) + "\n"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _print(report: Report, console: Console) -> None:
    facts = report.facts
    machine = f" ({facts.processor})" if facts.processor else ""
    console.print(Text.assemble(("keras-het doctor", "bold"), f" on {facts.host}{machine}"))
    for heading, findings in report.sections.items():
        if findings:
            console.print()
            console.print(Text(heading, style="bold"))
            console.print(_table(findings))
    console.print()
    console.print(Text.assemble(("keras_het would: ", "bold"), report.plan))
    console.print(_verdict(report))


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len(WARNING), no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.text))
        if finding.fix:
            table.add_row("", Text.assemble(("fix: ", "bold"), finding.fix))
    return table


def _verdict(report: Report) -> Text:
    faults, warnings = report.count(FAULT), report.count(WARNING)
    if faults:
        return Text(f"Training would fail: faults: {faults}, warnings: {warnings}.", "bold red")
    if warnings:
        return Text(f"Training would run; warnings: {warnings}.", "yellow")
    return Text("All is well.", "green")
