"""All checks in their order, and the report that they make."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_het import __version__
from keras_het.launch.doctor import cluster_checks, machine_checks
from keras_het.launch.doctor.facts import FAULT, NOTE, OK, WARNING, Facts, Finding
from keras_het.launch.doctor.links import Link, Measurement, describe_node, links
from keras_het.launch.local.display import printable

SECTIONS: Mapping[str, Callable[[Facts], Iterator[Finding]]] = {
    "Software": machine_checks.software,
    "GPUs": machine_checks.gpus,
    "Machine": machine_checks.machine,
    "Cluster": cluster_checks.cluster,
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What the checks found."""

    facts: Facts
    findings: tuple[Finding, ...]
    links: tuple[Link, ...]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "keras_het": __version__,
            "host": facts.host,
            "processor": facts.processor,
            "cpus": facts.cpus,
            "memory_bytes": facts.memory_limit,
            "driver": facts.driver,
            "gpus": [dataclasses.asdict(gpu) for gpu in facts.gpus],
            "tensorflow": dataclasses.asdict(facts.tensorflow),
            "cluster": facts.cluster.as_cluster_dict() if facts.cluster else None,
            "task": cluster_checks.own_task(facts.cluster) if facts.cluster else None,
            "extras": dict(facts.extras),
            "plan": plan_of(facts),
            "links": [dataclasses.asdict(link) for link in self.links],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "faults": self.count(FAULT),
            "warnings": self.count(WARNING),
        }


def run_checks(facts: Facts) -> tuple[Finding, ...]:
    return tuple(
        found for title, check in SECTIONS.items() for found in _under(title, check(facts))
    )


def report_on(facts: Facts, findings: Iterable[Finding], measurement: Measurement) -> Report:
    of_links = _under("Links", links(facts, measurement))
    return Report(facts, (*findings, *of_links), measurement.links)


def _under(section: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    return (dataclasses.replace(each, section=section) for each in findings if each.text)


def plan_of(facts: Facts) -> str:
    node, config = describe_node(facts), facts.cluster
    number = node["replicas"]
    replicas = f"{number} replica{'s' if number > 1 else ''} on {node['device']}"
    threads = f"input on {facts.cpus:g} CPUs"
    if facts.cluster_problem:
        return "Nothing: it would refuse TF_CONFIG."
    if config is None:
        return f"Train alone, with {replicas}; {threads}."
    own = cluster_checks.own_task(config)
    if config.is_summation_machine or config.is_serving_only:
        return f"As {own}: serve the others, without training."
    what = f"train in a sync group of {config.num_workers} workers"
    if config.is_async_worker or config.is_evaluator:
        what = "train asynchronously" if config.is_async_worker else "evaluate"
    return f"As {own}: {what}, with {replicas}; {threads}."


_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAULT: "bold red"}
_NO_END = 100_000
"""Width of lines that something else than a terminal reads: none is broken."""


def show(report: Report, stream: TextIO) -> None:
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = _NO_END
    with console.capture() as rendered:
        _print(report, console)
    # cells are filled with spaces up to the width of their column
    text = "\n".join(line.rstrip() for line in rendered.get().splitlines()) + "\n"
    stream.write(printable(text, stream))
    stream.flush()


def _print(report: Report, console: Console) -> None:
    facts = report.facts
    machine = f" ({facts.processor})" if facts.processor else ""
    console.print(Text.assemble(("keras-het doctor", "bold"), f" on {facts.host}{machine}"))
    for heading, findings in itertools.groupby(report.findings, lambda each: each.section):
        console.print()
        console.print(Text(heading, style="bold"))
        console.print(_table(findings))
    console.print()
    console.print(Text.assemble(("keras_het would: ", "bold"), plan_of(facts)))
    console.print(_verdict(report))


def _table(findings: Iterable[Finding]) -> Table:
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
