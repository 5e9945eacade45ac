"""A report in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_het.launch.report.facts import DeviceFacts, Facts, Repair
from keras_het.launch.report.plain_text import (
    change_text,
    count,
    difference,
    milliseconds,
    number,
    percent,
    score,
)
from keras_het.planning.diagnosis.recording import PHASES

_MOST_DEVICES = 24
_MOST_CHANGES = 12
_MOST_HARDWARE = 8
_BAR = 24
_NOT_A_TERMINAL = 140
_WIDE = 120
# Times that differ by less are equal.
_SAME = 0.005


def show(facts: Facts, console: Console) -> None:
    for each in _parts(facts, console.width):
        console.print(each)


def console_for(stream: object, width: int | None = None) -> Console:
    """Return a console that interprets nothing, and is wide enough for tables in files."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)  # type: ignore[arg-type]
    if width is None and not console.is_terminal:
        console.width = max(console.width, _NOT_A_TERMINAL)
    return console


def _parts(facts: Facts, width: int) -> Iterator[RenderableType]:
    yield Text(facts.run, style="bold")
    yield Text(_summary_line(facts))
    yield Text()
    causes = facts.diagnosis.verdict.causes
    for index, line in enumerate(facts.diagnosis.verdict.lines):
        cause = causes[index] if index < len(causes) else None
        style = "green" if cause is None else "red" if cause.severity == "critical" else "yellow"
        yield Text(line, style=f"bold {style}")
    start = "The verdict does not know all" if facts.diagnosis.verdict.lines else "No verdict"
    for reason in facts.diagnosis.verdict.missing:
        yield Text(f"{start}: {reason}.", style="yellow")
    if facts.plan:
        yield Text("\nPlan of the pipeline", style="bold")
        # whole lines: a table that is wrapped cannot be read
        yield Text("\n".join(f"  {line}" for line in facts.plan), no_wrap=True)
    if facts.devices:
        yield Text()
        yield from _devices(facts, width)
    yield from _repairs(facts)
    if line := _gain_line(facts):
        yield Text(f"\n{line}")
    yield from _changes(facts)
    if facts.exchanges:
        yield Text("\nAsync workers", style="bold")
    for line in facts.exchanges:
        yield Text(f"  {line}")
    if facts.messages:
        yield Text()
    for message in facts.messages:
        yield Text(f"Log: {message}", style="yellow")


def _devices(facts: Facts, width: int) -> Iterator[RenderableType]:
    shown = facts.slowest_first()[:_MOST_DEVICES]
    shown.sort(key=lambda each: each.index)
    is_wide = width >= _WIDE
    products = {each.device.model for each in facts.devices}
    has_products = len(products) > 1 and is_wide
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("device", min_width=10)
    if has_products:
        table.add_column("product")
    phases = (f"{name}\nms" for name in PHASES)
    for name in ("share", "samples\n/s", *phases, "vs\nfastest", "vs own\nbest"):
        table.add_column(name, justify="right")
    for each in shown:
        product = [Text(each.device.model)] if has_products else []
        numbers = (Text(text) for text in _device_numbers(each, with_parts=is_wide))
        table.add_row(str(each.index), Text(each.device.name), *product, *numbers)
    yield Text(f"Means of a step ({facts.of_recent})", style="bold")
    yield table
    if len(facts.devices) > len(shown):
        yield Text(f"and {len(facts.devices) - len(shown)} others; --html FILE shows all\n")
    for each in shown[:_MOST_HARDWARE]:
        known = [each.device.model if not has_products else "", each.hardware]
        if any(known):
            text = f"{each.device.name}: {', '.join(filter(None, known))}"
            yield Text(text, style="dim")
    if len(shown) > _MOST_HARDWARE:
        yield Text("--html FILE shows the hardware of all", style="dim")


def _repairs(facts: Facts) -> Iterator[RenderableType]:
    costs = facts.diagnosis.costs
    if costs is None:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(max_width=60)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    rows = [Repair("now", costs.step_seconds, 0.0), *facts.worst, *facts.phases]
    longest = max(each.seconds for each in rows)
    for each in rows:
        bar = round(_BAR * each.seconds / longest) if each.seconds > 0 else 0
        saved = difference(-each.saved) if each.name != "now" else ""
        table.add_row(
            Text(each.name), f"{milliseconds(each.seconds)} ms", saved, Text("▇" * bar, "cyan")
        )
    yield Text(f"\nWhat a step would take ({facts.of_recent})", style="bold")
    yield Padding(table, (0, 0, 0, 2), expand=False)


def _changes(facts: Facts) -> Iterator[RenderableType]:
    changes = facts.recording.changes
    if not changes:
        return
    yield Text(f"\nWhat was changed ({len(changes)})", style="bold")
    if len(changes) > _MOST_CHANGES:
        yield Text(f"  {len(changes) - _MOST_CHANGES} earlier ones; --html FILE shows more")
    for each in changes[-_MOST_CHANGES:]:
        yield Text(f"  step {each.step}: {change_text(each)}")


def _summary_line(facts: Facts) -> str:
    text = f"{count(len(facts.devices), 'replica')}, {count(facts.num_steps, 'step')}"
    speed, pauses = facts.speed, facts.recording.pauses
    if not speed.step_seconds > 0:
        return text
    old = ", old ones by their medians" if (facts.every > 1).any() else ""
    text = (
        f"{text}{old}: {milliseconds(speed.step_seconds)} ms a step, stalls included (median "
        f"{milliseconds(speed.median_seconds)} ms), {number(speed.samples_per_second)} samples/s"
    )
    if not pauses:
        return text
    longest = max(seconds for _, seconds in pauses)
    total = sum(seconds for _, seconds in pauses)
    return (
        f"{text}\nBetween epochs: {number(total)} s in {count(len(pauses), 'pause')}, the longest "
        f"{number(longest)} s; no part of a step"
    )


def _gain_line(facts: Facts) -> str:
    costs, gain = facts.diagnosis.costs, facts.diagnosis.gain
    if costs is None or facts.is_even is None:
        return ""
    if facts.is_even:
        return "Balance: shares are even."
    times = (
        f"even shares would take {milliseconds(gain * costs.step_seconds)} ms a step, now "
        f"{milliseconds(costs.step_seconds)} ms"
    )
    if abs(gain - 1) <= _SAME:
        text = "no difference"
    elif gain >= 1:
        text = f"{gain:.2f} times the samples/s"
    else:
        text = "even shares would be faster"
    return f"Balance: {times}: {text} ({facts.of_recent})."


def _device_numbers(device: DeviceFacts, with_parts: bool) -> list[str]:
    phases = [milliseconds(seconds) for seconds in device.phases]
    if with_parts:
        parts = (f" ({percent(part)})" if part == part else "" for part in device.fractions)
        phases = [f"{time}{part}" for time, part in zip(phases, parts, strict=True)]
    return [
        number(device.share),
        number(device.samples_per_second),
        *phases,
        score(device.best),
        score(device.own_best),
    ]
