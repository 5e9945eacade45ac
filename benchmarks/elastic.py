"""Seconds that a training loses when workers are killed, preempted and added.

    python benchmarks/elastic.py [--json FILE] [--quick] [--trainer TEXT] [--workers N] ...

Three workers on this machine (or N) train a deep, narrow model. A step's computation is emulated
(each worker waits); starting processes, forming the cluster, tracing and backups are real.

Trainers:

* `keras_het.ray`: `keras_het.ray.KerasTrainer`, a node of Ray for each worker, and `ElasticBackup`.
* `restart by hand`: `keras-het run` with the same script, which ends when a worker is lost, and is
  started again at once from the newest backup. A person would take longer.
* `Ray Train`: `ray.train.tensorflow.TensorflowTrainer`, MultiWorkerMirroredStrategy in the loop of
  its guide, `tf.train.Checkpoint` every 20 steps, Ray's own settings, the same elasticity.

`seconds_without_progress` is the longest time between two new steps after a disturbance; a step
that is repeated is no new one. `goodput` is the part of the time that went into new steps, each
counted with the median seconds of the trainer's own undisturbed step; `seconds_lost` is the rest,
for each disturbance.

Cases: `killed`, a worker is killed every 60 s, in turn, the chief too (median, `lowest`
and `highest`); `preempted`, Ray learns that a node will leave in 30 s, and it does; `joined`,
a node joins the two that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _elastic_engines import ENGINES
from _elastic_events import Events, breakdown, longest_gap, progress, step_seconds, useful_seconds

LONGEST_SECONDS = 240.0
# After the group of a new size has made its first step.
SECONDS_AFTER = 10.0
COLUMNS = (
    "case",
    "trainer",
    "seconds_without_progress",
    "lowest",
    "highest",
    "seconds_lost",
    "goodput",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one case of two trainers: form only")
    parser.add_argument("--trainer", default="", help="only trainers whose names begin so")
    parser.add_argument("--minutes", type=int, default=10, help="of kills; 10")
    parser.add_argument("--workers", type=int, default=3, help="3; with 2 each may have a core")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(**json.loads(options.run))
        return
    from _report import environment, print_table, write_report

    every, num_kills = (40.0, 1) if options.quick else (60.0, options.minutes)
    rows = []
    for trainer in (name for name in ENGINES if name.startswith(options.trainer)):
        # in a quick run each trainer takes half a minute or more to begin, so not all do all
        if not options.quick or trainer == "keras_het.ray":
            rows.append(killed(trainer, options.workers, every, num_kills, options.quick))
            print(rows[-1], flush=True)
        if not options.quick or trainer == "restart by hand":
            rows += resized(trainer, options.workers, options.quick)
            print(*rows[-2:], sep="\n", flush=True)
    print_table(rows, COLUMNS)
    write_report("elastic", rows, options.json, environment())


def killed(
    trainer: str, num_workers: int, every: float, num_kills: int, quick: bool
) -> dict[str, Any]:
    """Return the row of workers that are killed one after the other."""
    times, events, steps = _measure(
        trainer, num_workers, {"every": every, "num_kills": num_kills}, quick
    )
    start, kills, end = times["start"], times["kills"], times["end"]
    seconds = step_seconds(steps, kills[0])
    intervals = list(zip(kills, [*kills[1:], times["until"]], strict=True))
    gaps = [longest_gap(steps, *interval) for interval in intervals]
    parts = [breakdown(events, *interval) for interval in intervals]
    whole = [each for each in parts if each]
    useful = useful_seconds(steps, start, end, seconds)
    return {
        "case": "killed",
        "trainer": trainer,
        "workers": num_workers,
        "seconds_without_progress": round(statistics.median(gaps), 2),
        "lowest": round(min(gaps), 2),
        "highest": round(max(gaps), 2),
        "seconds_lost": round((end - start - useful) / len(kills), 2),
        "goodput": round(useful / (end - start), 3),
        "num_kills": len(kills),
        "seconds": round(end - start, 1),
        "step_seconds": round(seconds, 4),
        **{name: statistics.median(each[name] for each in whole) for name in (whole or [{}])[0]},
    }


def resized(trainer: str, num_workers: int, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of a node that leaves, and of one that joins."""
    times, events, steps = _measure(trainer, num_workers, {}, quick)
    seconds = step_seconds(steps, times["preempted"][0])
    return [
        {
            "case": case,
            "trainer": trainer,
            "workers": num_workers,
            "seconds_without_progress": round(longest_gap(steps, start, end), 2),
            "lowest": None,
            "highest": None,
            "seconds_lost": round(end - start - useful_seconds(steps, start, end, seconds), 2),
            "goodput": None,
            "seconds": round(end - start, 1),
            "step_seconds": round(seconds, 4),
            **breakdown(events, start, end),
        }
        for case, (start, end) in times.items()
    ]


def _measure(
    trainer: str, num_workers: int, case: dict[str, Any], quick: bool
) -> tuple[dict[str, Any], Any, Any]:
    """Run a case in a separate process; return its times, all events and its progress."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "folder": name,
            "num_workers": num_workers,
            "num_blocks": 2 if quick else 30,
            "step_seconds": 0.25,
            "checkpoint_steps": 20,
        }
        about = json.dumps({"trainer": trainer, "config": config, **case})
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "output").open("w") as output:
            done = subprocess.run(
                [sys.executable, __file__, "--run", about],
                env={**os.environ, **quiet},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            sys.exit((folder / "output").read_text()[-5000:])
        events = Events(folder)
        steps = progress(events.update())
        return json.loads((folder / "times").read_text()), events.all, steps


def run(trainer: str, config: dict[str, Any], every: float = 0.0, num_kills: int = 0) -> None:
    """Train and disturb; write the times of what was done."""
    folder = Path(config["folder"])
    engine = ENGINES[trainer](config)
    events = Events(folder)
    try:
        _wait(lambda: any(step["step"] >= 10 for step in events.update()))
        count = config["num_workers"]
        times = (
            kill(events, count, every, num_kills) if num_kills else resize(engine, count, events)
        )
        (folder / "times").write_text(json.dumps(times))
    finally:
        engine.stop()
    sys.stdout.flush()
    os._exit(0)  # the trainer's thread would wait for its workers


def kill(events: Events, num_workers: int, every: float, num_kills: int) -> dict[str, Any]:
    """Kill a worker in the middle of each interval."""
    start, kills = time.time(), []
    for number in range(num_kills):
        time.sleep(start + (number + 0.5) * every - time.time())
        # in turn; worker 0 is the chief
        steps = [step for step in events.update() if step["worker"] == (number + 1) % num_workers]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(steps[-1]["pid"], signal.SIGKILL)
            kills.append(time.time())
    end = start + num_kills * every
    # the last one may take as long as those before
    time.sleep(end + every / 2 - time.time())
    return {"start": start, "kills": kills, "end": end, "until": time.time()}


def resize(engine: Any, num_workers: int, events: Events) -> dict[str, Any]:
    """Take a node away, and add one."""
    times = {}
    for case, act, size in (
        ("preempted", engine.preempt, num_workers - 1),
        ("joined", engine.join, num_workers),
    ):
        began = time.time()
        act()
        _wait(lambda began=began, size=size: _has_grown(events, began, size))  # type: ignore[misc]
        time.sleep(SECONDS_AFTER)
        times[case] = began, time.time()
    return times


def _has_grown(events: Events, since: float, num_workers: int) -> bool:
    """Whether a group of a size has come farther than all before it."""
    steps = events.update()
    before = max((step["step"] for step in steps if step["time"] < since), default=0)
    new = [s for s in steps if s["time"] > since and s["num_workers"] == num_workers]
    return any(step["step"] > before for step in new)


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Nothing happened within {LONGEST_SECONDS} s.")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
