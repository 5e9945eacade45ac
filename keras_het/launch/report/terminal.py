"""A report in the terminal: the values of the tab's views as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_het.launch.report.plain_text import (
    UNKNOWN,
    change_text,
    count,
    milliseconds,
    number,
    percent,
    plain,
)
from keras_het.planning.diagnosis.recording import PHASES
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS
from keras_het.tensorboard import views
from keras_het.tensorboard.log_content import LogContent

_MOST_DEVICES, _MOST_CHANGES, _MOST_HARDWARE, _MOST_LINES = 24, 12, 8, 200
# Of devices and workers, those whose repair saves most, and more than noise.
_MOST_NAMED, _LEAST_SAVED = 3, 0.01
_BAR = 24
_NOT_A_TERMINAL = 140
_WIDE = 120
# Times that differ by less are equal.
_SAME = 0.005
# Quantities of the hardware, those that are their limits, units, and texts.
_HARDWARE = (
    ("hw.gpu.utilization", "", 0.01, "GPU {} %"),
    ("hw.gpu.memory.usage", "hw.gpu.memory.limit", 1e9, "{} GB"),
    ("hw.power", "keras_het.gpu.power_limit", 1.0, "{} W"),
    ("hw.temperature", "", 1.0, "{} °C"),
    ("keras_het.gpu.clock", "keras_het.gpu.clock_limit", 1e6, "{} MHz"),
    ("process.cpu.usage", "keras_het.cpu.budget", 1.0, "CPUs in use: {}"),
    ("keras_het.cpu.throttled", "", 0.01, "stopped by a CPU quota {} % of the time"),
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
    present = content.recording.newest()[1]
    devices = [{**recent["devices"][place], "place": place} for place in present]
    yield Text(plain(run), style="bold")
    yield Text(_summary(overview, len(devices)))
    yield Text()
    for line in diagnosis["verdict"]:
        yield Text(plain(line), style="bold")
    start = "The verdict does not know all" if diagnosis["verdict"] else "No verdict"
    for reason in diagnosis["missing"]:
        yield Text(f"{start}: {plain(reason)}.", style="yellow")
    if plan := views.pipeline(content)["text"]:
        yield Text("\nPlan of the pipeline", style="bold")
        lines = plan.splitlines()[:_MOST_LINES]
        # whole lines: a table that is wrapped cannot be read
        yield Text("\n".join(f"  {plain(line)}" for line in lines), no_wrap=True)
    if overview["last"] > overview["first"]:
        yield Text(f"\nMeans of a step ({which})", style="bold")
        yield from _devices(devices, diagnosis, width)
        yield from _hardware(devices, views.latest_hardware(content))
    if costs:
        yield Text(f"\nWhat a step would take ({which}, without stalls)", style="bold")
        yield _repairs(devices, costs)
    if line := _balance(devices, diagnosis):
        yield Text(f"\n{line}")
    yield from _changes(overview["changes"])
    yield from _exchanges(overview["exchanges"])
    for message in views.messages(content):
        yield Text(f"Log: {plain(message)}", style="yellow")


def _summary(overview: View, num_devices: int) -> str:
    num_steps = overview["last"] - overview["first"]
    text = f"{count(num_devices, 'replica')}, {count(num_steps, 'step')}"
    if not overview["step_seconds"]:
        return text
    old = ", some by medians of several" if overview["thinned"] else ""
    text = (
        f"{text}{old}: {milliseconds(overview['step_seconds'])} ms a step, stalls included (median "
        f"{milliseconds(overview['median_seconds'])} ms), "
        f"{number(overview['samples_per_second'])} samples/s"
    )
    if not overview["pauses"]:
        return text
    pauses = f"{number(overview['pause_seconds'])} s in {count(overview['pauses'], 'pause')}"
    return f"{text}\nBetween epochs: {pauses}; no part of a step"


def _devices(devices: list[dict[str, Any]], diagnosis: View, width: int) -> Iterator[Any]:
    is_wide = width >= _WIDE
    has_products = is_wide and len({each["model"] for each in devices}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("device", min_width=10)
    if has_products:
        table.add_column("product")
    phases = (f"{name}\nms" for name in PHASES)
    for name in ("share", "samples\n/s", *phases, "vs\nfastest", "vs own\nbest"):
        table.add_column(name, justify="right")
    shown = _slowest(devices, diagnosis["what_if"])
    for each in shown:
        wall = sum(each[name] or 0.0 for name in PHASES)
        share, compute = each["share"], each["compute"]
        speed = share / compute if share and compute and compute > 0 else None
        times = [
            milliseconds(each[name])
            + (f" ({percent(each[name] / wall)})" if is_wide and each[name] is not None else "")
            for name in PHASES
        ]
        scores = (
            (diagnosis["scores"] or {}).get(name, {each["place"]: None})[each["place"]]
            for name in ("against_best", "against_own_best")
        )
        table.add_row(
            *(str(each["place"]), Text(plain(each["name"]))),
            *([Text(plain(each["model"]))] if has_products else []),
            *(number(share), number(speed), *times),
            *(UNKNOWN if score is None else f"{score:.2f}" for score in scores),
        )
    yield table
    if len(devices) > len(shown):
        yield Text(f"and {len(devices) - len(shown)} others; --html FILE shows all\n")


def _slowest(devices: list[dict[str, Any]], costs: View | None) -> list[dict[str, Any]]:
    """Return the devices whose repair would save most, in their order."""

    def seconds(device: View) -> float:
        known = costs["by_device"][device["place"]] if costs else None
        return float("inf") if known is None else float(known)

    return sorted(sorted(devices, key=seconds)[:_MOST_DEVICES], key=lambda each: each["place"])


def _hardware(devices: list[dict[str, Any]], latest: Mapping[str, Any]) -> Iterator[Text]:
    for each in devices[:_MOST_HARDWARE]:
        known = {name: values[each["place"]] for name, values in latest.items()}
        known = {name: value for name, value in known.items() if value is not None}
        texts = [plain(each["model"])] if each["model"] else []
        for name, limit, unit, text in _HARDWARE:
            if known.get(name, 0.0) < unit and name == "keras_het.cpu.throttled":
                continue
            if name in known:
                most = f" of {number(known[limit] / unit)}" if limit in known else ""
                texts.append(
                    text.format(
                        f"{number(round(known[name] / unit, 0 if '%' in text else 2))}{most}"
                    )
                )
        if texts:
            yield Text(f"{plain(each['name'])}: {', '.join(texts)}", style="dim")
    if latest and len(devices) > _MOST_HARDWARE:
        yield Text("--html FILE shows the hardware of all", style="dim")


def _repairs(devices: list[dict[str, Any]], costs: View) -> RenderableType:
    now = costs["step_seconds"]

    def worst(seconds: Mapping[str, float | None]) -> list[tuple[str, float]]:
        saving = [
            (n, s) for n, s in seconds.items() if s is not None and 1 - s / now > _LEAST_SAVED
        ]
        return sorted(saving, key=lambda each: each[1])[:_MOST_NAMED]

    of_worker = Counter(str(each["worker"]) for each in devices)
    rows = [
        ("now", now),
        *worst({f"{each['name']} not slow": costs["by_device"][each["place"]] for each in devices}),
        *worst(
            {
                f"worker {name} not slow": seconds
                for name, seconds in costs["by_worker"].items()
                if of_worker[name] > 1 and len(of_worker) > 1
            }
        ),
        *((text, costs["by_phase"][name]) for name, text in PHASE_REPAIRS.items()),
    ]
    longest = max(seconds or 0.0 for _, seconds in rows)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(max_width=60)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in rows:
        bar = "▇" * round(_BAR * max(seconds or 0.0, 0.0) / longest)
        change = round(100 * (seconds / now - 1)) if seconds is not None else 0
        saved = "" if name == "now" or seconds is None else f"{change:+} %".replace("+0", "0")
        table.add_row(Text(plain(name)), f"{milliseconds(seconds)} ms", saved, Text(bar, "cyan"))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _balance(devices: list[dict[str, Any]], diagnosis: View) -> str:
    costs, gain = diagnosis["what_if"], diagnosis["gain"]
    shares = [each["share"] for each in devices if each["share"] is not None]
    if not costs or gain is None or len(shares) < 2:
        return ""
    # the last samples of a batch that cannot be divided evenly go somewhere
    if max(shares) - min(shares) <= 1:
        return "Balance: shares are even."
    if abs(gain - 1) <= _SAME:
        text = "no difference"
    else:
        text = f"{gain:.2f} times the samples/s" if gain > 1 else "even shares would be faster"
    now = costs["step_seconds"]
    return (
        f"Balance: even shares would take {milliseconds(gain * now)} ms a step, now "
        f"{milliseconds(now)} ms: {text}."
    )


def _changes(changes: list[View]) -> Iterator[Text]:
    if changes:
        yield Text(f"\nWhat was changed ({len(changes)})", style="bold")
    if len(changes) > _MOST_CHANGES:
        yield Text(f"  {len(changes) - _MOST_CHANGES} earlier ones; --html FILE shows more")
    for each in changes[-_MOST_CHANGES:]:
        yield Text(f"  step {each['step']}: {plain(change_text(each['kind'], each['text']))}")


def _exchanges(exchanges: list[View]) -> Iterator[Text]:
    latest = {_worker(each.get("worker")): each for each in exchanges}
    if latest:
        yield Text("\nAsync workers", style="bold")
    for worker, each in sorted(latest.items()):
        known = [
            (each.get("samples_per_second"), 1.0, "{} samples/s"),
            (each.get("staleness"), 1.0, "staleness {}"),
            (each.get("exchange_seconds"), 1e3, "{} ms an exchange"),
        ]
        texts = [
            text.format(number(value, factor))
            for value, factor, text in known
            if isinstance(value, int | float)
        ]
        heard = f"last heard of at step {int(each['step'])}"
        yield Text(f"  async worker {worker}: {', '.join([*texts, heard])}")


def _worker(name: Any) -> str:
    return number(name) if isinstance(name, float) else plain(str(name))
