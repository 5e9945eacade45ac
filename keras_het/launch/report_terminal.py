"""A report in the terminal: the values of the tab's views as tables."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from keras_het.planning.diagnosis.recording import PHASES
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS
from keras_het.telemetry.event_log import READ_ERRORS, Run, read_run, runs_below
from keras_het.tensorboard import views
from keras_het.tensorboard.log_content import LogContent, UnreadableLogError
from keras_het.tensorboard.log_format import DIRECTORY

_MOST_CHARACTERS = 300
UNKNOWN = "–"
_WITHOUT_DECIMALS = 100.0
_LARGE = 1e7


def plain(text: str) -> str:
    """Return one line of printable characters, which cannot drive a terminal or turn the text."""
    cut = text[: _MOST_CHARACTERS + 1]
    line = "".join(
        char if char.isprintable() else " " if char in "\n\r\t" else "\N{REPLACEMENT CHARACTER}"
        for char in cut
    )
    return f"{line[:_MOST_CHARACTERS]}…" if len(cut) > _MOST_CHARACTERS else line


def number(value: float | None, factor: float = 1.0) -> str:
    """Return a number times a factor with three digits, a dash where it is unknown."""
    if value is None or not math.isfinite(value * factor):
        return UNKNOWN
    shown = value * factor
    return f"{shown:.0f}" if _WITHOUT_DECIMALS <= abs(shown) < _LARGE else f"{shown:.3g}"


def milliseconds(seconds: float | None) -> str:
    return number(seconds, 1e3)


def count(amount: int, one: str) -> str:
    return f"{amount} {one}{'' if amount == 1 else 's'}"


def change_text(kind: str, text: str) -> str:
    return text if text.startswith(kind) else f"{kind}: {text}"


_MOST_DEVICES, _MOST_CHANGES, _MOST_HARDWARE, _MOST_LINES = 24, 12, 8, 200
# Of devices and workers, those whose repair saves most, and more than noise.
_MOST_NAMED, _LEAST_SAVED = 3, 0.01
_BAR = 24
_NOT_A_TERMINAL = 140
_WIDE = 120
# Times that differ by less are equal.
_SAME = 0.005
# Quantities of the hardware, those that are their limits, units, and texts.
_THROTTLED = "keras_het.cpu.throttled"
_HARDWARE = (
    ("hw.gpu.utilization", "", 0.01, "GPU {} %"),
    ("hw.gpu.memory.usage", "hw.gpu.memory.limit", 1e9, "{} GB"),
    ("hw.power", "keras_het.gpu.power_limit", 1.0, "{} W"),
    ("hw.temperature", "", 1.0, "{} °C"),
    ("keras_het.gpu.clock", "keras_het.gpu.clock_limit", 1e6, "{} MHz"),
    ("process.cpu.usage", "keras_het.cpu.budget", 1.0, "CPUs in use: {}"),
    (_THROTTLED, "", 0.01, "stopped by a CPU quota {} % of the time"),
    ("system.cpu.utilization", "", 0.01, "host {} % busy"),
)

View = Mapping[str, Any]


def show(run: str, content: LogContent, console: Console) -> None:
    for each in _parts(run, content, console.width):
        console.print(each)


def console_for(stream: object, width: int | None = None) -> Console:
    """Return a console that interprets nothing, and is wide enough for tables in files."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)  # type: ignore[arg-type]
    if width is None and not console.is_terminal:
        console.width = max(console.width, _NOT_A_TERMINAL)
    return console


def _parts(run: str, content: LogContent, width: int) -> Iterator[RenderableType]:
    overview, diagnosis = views.overview(content, content), views.diagnosis(content)
    costs = diagnosis["what_if"]
    first, last = costs["steps"] if costs else (overview["first"], overview["last"] - 1)
    recent = views.overview(content, views.between(content, first, last + 1))
    which = f"steps {first} to {last}" if last > first else f"step {first}"
    devices = [
        {**recent["devices"][place], "place": place, "costs": costs and costs["by_device"][place]}
        for place in content.recording.newest()[1]
    ]
    yield _text(run, "bold")
    yield from map(_text, _summary(overview, len(devices)))
    yield _text("")
    yield from (_text(line, "bold") for line in diagnosis["verdict"])
    start = "The verdict does not know all" if diagnosis["verdict"] else "No verdict"
    yield from (_text(f"{start}: {reason}.", "yellow") for reason in diagnosis["missing"])
    if plan := views.pipeline(content)["text"]:
        yield from _heading("Plan of the pipeline")
        for line in plan.splitlines()[:_MOST_LINES]:
            yield Text(f"  {plain(line)}", no_wrap=True)  # a table that is wrapped cannot be read
    if overview["last"] > overview["first"]:
        yield from _heading(f"Means of a step ({which})")
        yield from _devices(devices, diagnosis["scores"], width >= _WIDE)
        yield from _hardware(devices, views.latest_hardware(content))
    if costs:
        yield from _heading(f"What a step would take ({which}, without stalls)")
        yield _repairs(devices, costs)
        yield from map(_text, _balance(devices, costs["step_seconds"], diagnosis["gain"]))
    if changes := overview["changes"]:
        yield from _heading(f"What was changed ({len(changes)})")
        if len(changes) > _MOST_CHANGES:
            yield _text(f"{len(changes) - _MOST_CHANGES} earlier ones; --html FILE shows more")
        for each in changes[-_MOST_CHANGES:]:
            yield _text(f"  step {each['step']}: {change_text(each['kind'], each['text'])}")
    if latest := {str(each.get("worker")): each for each in overview["exchanges"]}:
        yield from _heading("Async workers")
        yield _exchanges(latest)
    yield from (_text(f"Log: {message}", "yellow") for message in content.messages)


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style)


def _heading(text: str) -> tuple[Text, Text]:
    return Text(), _text(text, "bold")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int) -> Table:
    """Return a table whose first columns are texts, and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < num_texts else "right")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _summary(overview: View, num_devices: int) -> Iterator[str]:
    num_steps = overview["last"] - overview["first"]
    text = f"{count(num_devices, 'replica')}, {count(num_steps, 'step')}"
    if overview["step_seconds"]:
        later = ", later ones by their medians" if overview["thinned"] else ""
        text = (
            f"{text}{later}: {milliseconds(overview['step_seconds'])} ms a step, stalls included "
            f"(median {milliseconds(overview['median_seconds'])} ms), "
            f"{number(overview['samples_per_second'])} samples/s"
        )
    yield text
    if overview["pauses"]:
        seconds, pauses = number(overview["pause_seconds"]), count(overview["pauses"], "pause")
        yield f"Between epochs: {seconds} s in {pauses}; no part of a step"


def _devices(
    devices: Sequence[View], scores: View | None, is_wide: bool
) -> Iterator[RenderableType]:
    has_products = is_wide and len({each["model"] for each in devices}) > 1
    slowest = sorted(devices, key=lambda each: each["costs"] or float("inf"))[:_MOST_DEVICES]

    def row(device: View) -> Iterator[str]:
        yield f"{device['place']}  {device['name']}"
        if has_products:
            yield device["model"]
        share, compute = device["share"], device["compute"]
        speed = share / compute if share and compute and compute > 0 else None
        yield number(share)
        yield number(speed)
        wall = sum(device[name] or 0.0 for name in PHASES)
        for name in PHASES:
            is_part = is_wide and device[name] is not None and wall > 0
            part = f" ({round(100 * device[name] / wall)} %)" if is_part else ""
            yield f"{milliseconds(device[name])}{part}"
        for of_all in (scores or {}).values():
            score = of_all[device["place"]]
            yield UNKNOWN if score is None else f"{score:.2f}"

    products = ["product"] if has_products else []
    phases = [f"{name}\nms" for name in PHASES]
    names = ["device", *products, "share", "samples\n/s", *phases, "vs\nfastest", "vs own\nbest"]
    shown = sorted(slowest, key=lambda each: each["place"])
    yield _table(names, map(tuple, map(row, shown)), 1 + has_products)
    if len(devices) > len(shown):
        yield _text(f"and {len(devices) - len(shown)} others; --html FILE shows all")


def _hardware(devices: Sequence[View], latest: Mapping[str, Any]) -> Iterator[Text]:
    for each in devices[:_MOST_HARDWARE]:
        known = {name: values[each["place"]] for name, values in latest.items()}
        texts = [each["model"]] if each["model"] else []
        for name, limit, unit, text in _HARDWARE:
            if known.get(name) is None or (name == _THROTTLED and known[name] < unit):
                continue
            value = number(round(known[name] / unit, 0 if "%" in text else 2))
            most = known.get(limit)
            texts.append(
                text.format(value if most is None else f"{value} of {number(most / unit)}")
            )
        if texts:
            yield _text(f"{each['name']}: {', '.join(texts)}", "dim")
    if latest and len(devices) > _MOST_HARDWARE:
        yield _text("--html FILE shows the hardware of all", "dim")


def _repairs(devices: Sequence[View], costs: View) -> RenderableType:
    now = costs["step_seconds"]

    def worst(seconds: Mapping[str, float | None]) -> list[tuple[str, float]]:
        known = [(name, each) for name, each in seconds.items() if each is not None]
        saving = [each for each in known if 1 - each[1] / now > _LEAST_SAVED]
        return sorted(saving, key=lambda each: each[1])[:_MOST_NAMED]

    of_worker = Counter(str(each["worker"]) for each in devices)
    shared = [name for name in of_worker if of_worker[name] > 1 and len(of_worker) > 1]
    rows = [
        ("now", now),
        *worst({f"{each['name']} not slow": each["costs"] for each in devices}),
        *worst({f"worker {name} not slow": costs["by_worker"][name] for name in shared}),
        *((text, costs["by_phase"][name] or now) for name, text in PHASE_REPAIRS.items()),
    ]
    longest = max(seconds for _, seconds in rows)
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for name, seconds in rows:
        bar = "▇" * round(_BAR * max(seconds, 0.0) / longest)
        saved = "" if name == "now" else f"{round(100 * (seconds / now - 1))} %"
        table.add_row(_text(f"  {name}"), f"{milliseconds(seconds):>5} ms", f"{saved:>5}", bar)
    return table


def _balance(devices: Sequence[View], now: float, gain: float | None) -> Iterator[str]:
    shares = [each["share"] for each in devices if each["share"] is not None]
    if gain is None or len(shares) < 2:
        return
    yield ""
    # the last samples of a batch that cannot be divided evenly go somewhere
    if max(shares) - min(shares) <= 1:
        yield "Balance: shares are even."
        return
    faster = f"{gain:.2f} times the samples/s" if gain > 1 else "even shares would be faster"
    text = faster if abs(gain - 1) > _SAME else "no difference"
    times = f"{milliseconds(gain * now)} ms a step, now {milliseconds(now)} ms"
    yield f"Balance: even shares would take {times}: {text}."


def _exchanges(latest: Mapping[str, View]) -> Table:
    columns = ("worker", "last heard of\nat step", "samples\n/s", "staleness", "exchange\nms")
    factors = {"step": 1.0, "samples_per_second": 1.0, "staleness": 1.0, "exchange_seconds": 1e3}
    rows = []
    for worker, each in sorted(latest.items()):
        values = [each.get(name) for name in factors]
        known = [value if isinstance(value, int | float) else None for value in values]
        rows.append([worker.removesuffix(".0"), *map(number, known, factors.values())])
    return _table(columns, rows, 1)


_MOST_NAMES = 8


def choose_run(log_dir: str, name: str | None) -> tuple[Run, list[str]]:
    """Return a training, by default the one written last, and the names of the others."""
    try:
        runs = runs_below(log_dir)
        if not runs:
            raise ValueError(_nothing_there(log_dir))
        chosen = max(runs, key=lambda each: _written(runs[each]))
        if name is not None:
            names = [os.path.normpath(name), os.path.normpath(f"{name}/{DIRECTORY}")]
            chosen = next((each for each in names if each in runs), "")
            if not chosen:
                raise ValueError(
                    f"There is no training {name!r} in this log. There is: {listed([*runs])}."
                )
        others = [each for each in runs if each != chosen]
        return Run(chosen, read_run(runs[chosen])), others
    except UnreadableLogError as error:
        more = f" Choose another with --run NAME: {listed(others)}." if others else ""
        raise ValueError(f"The log in {chosen} cannot be read: {error}{more}") from error
    except tf.errors.OpError as error:
        raise OSError(f"{log_dir!r} cannot be read: {error.message}") from error


def listed(names: list[str]) -> str:
    shown = ", ".join(plain(each) for each in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _written(paths: list[str]) -> int:
    try:
        return max(tf.io.gfile.stat(path).mtime_nsec for path in paths)
    except READ_ERRORS:  # removed meanwhile
        return 0


def _nothing_there(log_dir: str) -> str:
    files = [name for _, _, names in tf.io.gfile.walk(log_dir) for name in names]
    others = count(sum("tfevents" in name for name in files), "event file")
    return (
        f"There is no log of keras_het below {log_dir!r}; {others} there of other writers. A "
        f"training writes one with keras_het.callbacks.Telemetry({log_dir!r}) among the callbacks "
        "of model.fit, on all workers."
    )
