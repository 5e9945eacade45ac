"""A model in stages (PipelineStrategy) against data parallelism on the same devices.

    python benchmarks/pipeline.py [--json FILE] [--quick] [--case TEXT]

Two hosts, network namespaces behind links of 100 Mbit/s (jumbo frames), have two devices each, and
in "unlike links" three hosts behind 200, 100 and 50 Mbit/s; inside a host nothing is limited.
Devices are EMULATED, because they share the cores of this machine: each takes at least its time for
a sample. Cases: "vgg" (few weights in the convolutions,
most in the dense head), "transformer" (six blocks), "wide" (wide activations, few weights: data
parallelism is better); in one process without a network "emulated" (devices of speed 4:2:1:1), and
"memory" (limits that data parallelism cannot meet, so that only its weights are compared). Modes:
"pipeline" (the planner's choice), "all_reduce" and "summation" (HeterogeneousStrategy, balanced),
"stock" (MultiWorkerMirroredStrategy with a process for each device, or MirroredStrategy in one
process; custom loops), and the pipeline with plans that were not chosen: "one stage" on all
devices, and the best cut in "two stages".

"recompute" trains "wide" in four stages of one process with activations kept ("never"), computed
again ("always"), and as the planner decides ("auto") where a device holds what is halfway between
both. `planned_mb` is what the planner expects of the fullest device.

All modes are alive and take turns in short blocks; rows are medians. Ends of epochs, when a
pipeline gathers the whole model, are not timed. Cases with hosts need root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from _namespaces import limited_hosts, why_not
from _pipeline_training import Case, run_process
from _report import environment, print_table, write_report

import keras_het  # noqa: F401 - before the forks, so they need not import TensorFlow

MBIT = 100.0
PORT = 7000
SECRET = "of this benchmark only, not secret"
TIMEOUT = 400
TOLERANCE = 1e-5
PEERS = ("all_reduce", "summation", "stock")
EQUAL = (1.0, 1.0, 1.0, 1.0)
CASES = {
    # the all-reduce is two thirds of a data-parallel step: what a pipeline gains depends on it
    "vgg": Case("vgg", 64, 8, EQUAL, 2, 0.015),
    "transformer": Case("transformer", 32, 8, EQUAL, 2, 0.03),
    "wide": Case("wide", 64, 8, EQUAL, 2, 0.015),
    "emulated": Case("vgg", 64, 8, (4.0, 2.0, 1.0, 1.0), 1, 0.04),
    "memory": Case("vgg", 64, 8, EQUAL, 1, 0.015, memory_bytes=14e6),
    "unlike links": Case("vgg", 60, 6, (1.0,) * 6, 3, 0.015, links=(200.0, 100.0, 50.0)),
    "recompute": Case("wide", 64, 8, EQUAL, 1, 0.015, split_after=("wide_0", "wide_1", "wide_3")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one short block: form, not numbers")
    parser.add_argument("--case", default="", help="only cases whose names begin so")
    options = parser.parse_args()
    names = ["emulated"] if options.quick and not options.case else list(CASES)
    rows: list[dict[str, Any]] = []
    for name in names:
        if name.startswith(options.case):
            rows += (measure_recompute if name == "recompute" else measure)(name, options.quick)
    print_table([row for row in rows if "skipped" not in row] or rows)
    write_report("pipeline", rows, options.json, environment())


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of one case: all modes take turns."""
    case = CASES[name]
    reason = why_not() if case.hosts > 1 else None
    if reason:
        print(f"{name} skipped: {reason}", file=sys.stderr)
        return [row_of(name, "all", {}, [], [], reason)]
    blocks, steps = (1, 2) if quick else (5, 4)
    with contextlib.ExitStack() as stack:
        rates = case.links or [MBIT] * case.hosts
        hosts = stack.enter_context(limited_hosts(rates, mtu=9000)) if case.hosts > 1 else None
        groups = {"pipeline": stack.enter_context(Group(case, hosts, "pipeline", 0, None))}
        groups["pipeline"].wait_for_start()
        others = groups["pipeline"].info["others"]
        chosen = groups["pipeline"].info["plan"]
        modes: list[tuple[str, Any]] = [(mode, None) for mode in peers_of(case)]
        measured = groups["pipeline"].info["measured"]
        modes += [(m, (plan, measured)) for m, plan in others.items() if not same(plan, chosen)]
        for number, (mode, forced) in enumerate(modes, 1):
            groups[mode] = stack.enter_context(Group(case, hosts, mode, number, forced))
        for mode, _ in modes:
            groups[mode].wait_for_start()
        check_weights(groups)
        timed = {m: g for m, g in groups.items() if m not in PEERS or not case.memory_bytes}
        times = [{m: each.run(steps) for m, each in timed.items()} for _ in range(blocks)]
    seconds = {mode: [turn[mode] for turn in times] for mode in timed}
    base = seconds.get("all_reduce", [])
    rows = [row_of(name, mode, groups[mode].info, seconds.get(mode, []), base) for mode in groups]
    for row in rows:
        if row["mode"] not in timed:
            row["plan"] = "does not fit; trained without limits, for its weights"
    return rows


def measure_recompute(name: str, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of one model whose activations are kept, or computed again."""
    case = CASES[name]
    blocks, steps = (1, 2) if quick else (5, 4)
    groups: dict[str, Group] = {}
    with contextlib.ExitStack() as stack:

        def start(recompute: str, memory_bytes: float | None = None) -> float:
            limited = dataclasses.replace(case, recompute=recompute, memory_bytes=memory_bytes)
            group = Group(limited, None, "pipeline", len(groups), None)
            groups[recompute] = stack.enter_context(group)
            group.wait_for_start()
            return float(max(group.info["plan"].memory_bytes))

        most, least = start("never"), start("always")
        start("auto", (most + least) / 2)
        check_weights(groups, "never")
        times = [{mode: each.run(steps) for mode, each in groups.items()} for _ in range(blocks)]
    seconds = {mode: [turn[mode] for turn in times] for mode in groups}
    never = seconds["never"]
    return [row_of(name, mode, each.info, seconds[mode], never) for mode, each in groups.items()]


def peers_of(case: Case) -> tuple[str, ...]:
    if case.memory_bytes is not None:
        return ("all_reduce",)  # trains without the limits
    return PEERS if case.hosts > 1 else ("all_reduce", "stock")


def same(plan: Any, chosen: Any) -> bool:
    """Whether two plans have the same stages on the same devices."""
    both = [[(s.first, s.end, s.devices, s.routes) for s in p.stages] for p in (plan, chosen)]
    return both[0] == both[1]


def row_of(
    case: str,
    mode: str,
    info: dict[str, Any],
    seconds: list[float],
    base: list[float],
    skipped: str | None = None,
) -> dict[str, Any]:
    plan = info.get("plan")
    ratios = [b / a for a, b in zip(seconds, base, strict=False)]
    row = {
        "case": case,
        "mode": mode,
        "ratio_to_data_parallel": round(statistics.median(ratios), 3) if ratios else None,
        "predicted_step_ms": None if plan is None else round(1e3 * plan.step_seconds, 1),
        "measured_step_ms": round(1e3 * statistics.median(seconds), 1) if seconds else None,
        "lowest_ms": round(1e3 * min(seconds), 1) if seconds else None,
        "highest_ms": round(1e3 * max(seconds), 1) if seconds else None,
        "peak_mb": round(info["peak_mb"]) if info else None,
        "planned_mb": None if plan is None else round(max(plan.memory_bytes) / 1e6, 2),
        "plan": "" if plan is None else plan_text(plan),
    }
    return {**row, "skipped": skipped} if skipped else row


def plan_text(plan: Any) -> str:
    """Return layers @ devices of each stage, such as "0-9 @ 0,1 | 9-12 @ 2"."""
    stages = [
        f"{stage.first}-{stage.end} @ {','.join(map(str, stage.devices))}"
        + (f" again {len(stage.recomputed)}" if stage.recomputed else "")
        for stage in plan.stages
    ]
    return " | ".join(stages)


def check_weights(groups: dict[str, Group], base: str = "all_reduce") -> None:
    """Refuse to compare trainings of different results."""
    expected = groups[base].weights()
    for mode, each in groups.items():
        found = each.weights()
        worst = max(float(abs(a - b).max()) for a, b in zip(found, expected, strict=True))
        print(f"  {mode}: weights differ by {worst:.1e} from {base}", flush=True)
        if worst > TOLERANCE:
            raise RuntimeError(f"{mode} trains something else: weights differ by {worst}.")


class Group:
    """The processes of one mode.

    Args:
        case: the case.
        hosts: the hosts, None for this machine.
        mode: the mode.
        number: number of the mode, for ports.
        forced: a plan and the measurements for it, or None.
    """

    def __init__(self, case: Case, hosts: Any, mode: str, number: int, forced: Any) -> None:
        per_host = case.devices_per_host if mode == "stock" and case.hosts > 1 else 1
        places = [(host, i) for host in range(case.hosts) for i in range(per_host)]
        addresses = [
            f"{hosts.address(host) if hosts else 'localhost'}:{PORT + 10 * number + i}"
            for host, i in places
        ]
        self.info: dict[str, Any] = {}
        self._mode = mode
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("fork")
        for index, (host, _) in enumerate(places):
            own, other = context.Pipe()
            arguments = (hosts, host, addresses, index, (case, mode, forced), other)
            process = context.Process(target=enter, args=arguments, daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)

    def wait_for_start(self) -> None:
        """Wait until all processes have trained their first steps."""
        found = [self._receive(pipe) for pipe in self._pipes]
        measured = [each["measured"] for each in found]
        peak = max(each["peak_mb"] for each in found)
        self.info = {**found[0], "peak_mb": peak, "measured": measured}
        plan = found[0]["plan"]
        print(f"{self._mode} trains {'' if plan is None else plan_text(plan)}", flush=True)

    def weights(self) -> list[Any]:
        """Return the weights of the first process."""
        self._pipes[0].send("weights")
        return list(self._receive(self._pipes[0]))

    def run(self, steps: int) -> float:
        """Return the seconds of a step in a block of steps."""
        for pipe in self._pipes:
            pipe.send(steps)
        return max(float(self._receive(pipe)) for pipe in self._pipes)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, pipe: Any) -> Any:
        if not pipe.poll(TIMEOUT):
            raise TimeoutError(f"{self._mode}: no answer within {TIMEOUT} s")
        try:
            answer = pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self._mode}: a process has ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def enter(
    hosts: Any, host: int, addresses: list[str], index: int, task: tuple[Case, str, Any], pipe: Any
) -> None:
    """Move a forked process to its host, and train."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    if hosts is not None:
        hosts.enter(host)
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
    os.environ.update(KERAS_HET_SECRET=SECRET, no_proxy="*")
    case, mode, forced = task
    run_process(case, mode, forced, index, pipe)


if __name__ == "__main__":
    main()
