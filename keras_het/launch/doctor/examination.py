"""All checks in their order, and the report that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from keras_het import __version__
from keras_het.launch.doctor import (
    cluster_checks,
    gpu_checks,
    host_checks,
    link_checks,
    software_checks,
)
from keras_het.launch.doctor.facts import Facts
from keras_het.launch.doctor.findings import FAULT, WARNING, Finding
from keras_het.launch.doctor.links import Link, Measurement, describe_node

Check = Callable[[Facts], Iterator[Finding]]

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "Software": (
        software_checks.tensorflow_import,
        software_checks.versions,
        software_checks.keras_backend,
        software_checks.extras,
        software_checks.emulation,
    ),
    "GPUs": (
        gpu_checks.driver,
        gpu_checks.driver_age,
        gpu_checks.tensorflow_build,
        gpu_checks.hidden_gpus,
        gpu_checks.kernels,
        gpu_checks.used_gpus,
        gpu_checks.gpus_in_use,
        gpu_checks.gpu_order,
    ),
    "Machine": (
        host_checks.cpu_budget,
        host_checks.cpu_quota,
        host_checks.memory,
        host_checks.shared_memory,
        host_checks.room_for_logs,
        host_checks.public_address,
    ),
    "Cluster": (
        cluster_checks.tf_config,
        cluster_checks.own_address,
        cluster_checks.other_names,
        cluster_checks.loopback,
        cluster_checks.secret,
        cluster_checks.proxies,
    ),
}
LINKS = "Links"


@dataclasses.dataclass(frozen=True)
class Report:
    """What the checks found."""

    facts: Facts
    sections: Mapping[str, tuple[Finding, ...]]
    links: tuple[Link, ...]
    plan: str

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings in their order."""
        return tuple(finding for section in self.sections.values() for finding in section)

    def count(self, level: str) -> int:
        """Return the number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON has."""
        facts = self.facts
        return {
            "keras_het": __version__,
            "host": facts.host,
            "processor": facts.processor,
            "cpus": facts.cpus,
            "memory_bytes": facts.memory_limit,
            "driver": facts.driver,
            "gpus": [dataclasses.asdict(gpu) for gpu in facts.gpus],
            "tensorflow": dataclasses.asdict(facts.tensorflow) if facts.tensorflow else None,
            "cluster": facts.cluster.as_cluster_dict() if facts.cluster else None,
            "task": cluster_checks.own_task(facts.cluster) if facts.cluster else None,
            "extras": dict(facts.extras),
            "plan": self.plan,
            "links": [dataclasses.asdict(link) for link in self.links],
            "findings": [
                {"section": name, **dataclasses.asdict(finding)}
                for name, section in self.sections.items()
                for finding in section
            ],
            "faults": self.count(FAULT),
            "warnings": self.count(WARNING),
        }


def run_checks(facts: Facts) -> dict[str, tuple[Finding, ...]]:
    """Return what all checks of this machine find, by heading."""
    return {
        heading: tuple(
            finding for check in checks for finding in _named(check.__name__, check(facts))
        )
        for heading, checks in CHECKS.items()
    }


def report_on(
    facts: Facts, sections: Mapping[str, tuple[Finding, ...]], measurement: Measurement
) -> Report:
    """Return the report."""
    found = tuple(_named(LINKS.lower(), link_checks.links(facts, measurement)))
    return Report(
        facts, {**sections, **({LINKS: found} if found else {})}, measurement.links, plan_of(facts)
    )


def plan_of(facts: Facts) -> str:
    """Return what keras_het would do on this machine."""
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
    if config.is_async_worker:
        return f"As {own}: train asynchronously, with {replicas}; {threads}."
    if config.is_evaluator:
        return f"As {own}: evaluate, with {replicas}; {threads}."
    group = f"in a sync group of {config.num_workers} workers"
    return f"As {own}: train {group}, with {replicas}; {threads}."


def _named(name: str, found: Iterable[Finding]) -> Iterator[Finding]:
    for finding in found:
        yield dataclasses.replace(finding, check=name)
