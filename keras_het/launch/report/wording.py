"""Sentences of a report, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence

from keras_het.launch.report.facts import DeviceFacts, Facts
from keras_het.launch.report.plain_text import count, milliseconds, number, percent, score
from keras_het.planning.diagnosis.recording import Change

# Times that differ by less are equal.
_SAME = 0.005


def summary_line(facts: Facts) -> str:
    """Return what was trained how fast, in one line."""
    text = f"{count(len(facts.devices), 'replica')}, {count(facts.num_steps, 'step')}"
    pauses = facts.recording.pauses
    if not facts.step_seconds > 0:
        return text
    old = ", old ones by their medians" if (facts.every > 1).any() else ""
    text = (
        f"{text}{old}: {milliseconds(facts.step_seconds)} ms a step, stalls included (median "
        f"{milliseconds(facts.median_seconds)} ms), {number(facts.samples_per_second)} samples/s"
    )
    if not pauses:
        return text
    longest = max(seconds for _, seconds in pauses)
    total = sum(seconds for _, seconds in pauses)
    return (
        f"{text}\nBetween epochs: {number(total)} s in {count(len(pauses), 'pause')}, the longest "
        f"{number(longest)} s; no part of a step"
    )


def missing_lines(facts: Facts) -> list[str]:
    """Return what the verdict would need to know; without one, that there is none."""
    start = "The verdict does not know all" if facts.verdict.lines else "No verdict"
    return [f"{start}: {reason}." for reason in facts.verdict.missing]


def gain_line(facts: Facts) -> str:
    """Return what balancing has gained against even shares; empty if that is unknown."""
    repairs = facts.repairs
    if repairs.even is None:
        return ""
    if repairs.is_even:
        return "Balance: shares are even."
    times = (
        f"even shares would take {milliseconds(repairs.even.seconds)} ms a step, now "
        f"{milliseconds(repairs.step_seconds)} ms"
    )
    if abs(repairs.gain - 1) <= _SAME:
        gain = "no difference"
    elif repairs.gain >= 1:
        gain = f"{repairs.gain:.2f} times the samples/s"
    else:
        gain = "even shares would be faster"
    return f"Balance: {times}: {gain} ({facts.of_recent})."


def device_numbers(device: DeviceFacts, with_parts: bool = True) -> list[str]:
    """Return share, speed, each phase in milliseconds, and both scores."""
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


def exchange_lines(facts: Facts) -> Sequence[str]:
    """Return a line about each async worker."""
    lines = []
    for each in facts.exchanges:
        known = []
        if each.samples_per_second == each.samples_per_second:
            known.append(f"{number(each.samples_per_second)} samples/s")
        if each.staleness == each.staleness:
            most = number(each.most_staleness)
            known.append(f"staleness {number(each.staleness)} in the middle, {most} at most")
        if each.seconds == each.seconds:
            known.append(f"{milliseconds(each.seconds)} ms an exchange")
        known.append(f"heard of {count(each.number, 'time')}, last at step {each.last_step}")
        lines.append(f"async worker {each.worker}: {', '.join(known)}")
    return lines


def change_text(change: Change) -> str:
    """Return what was changed and why."""
    text = change.text
    return text if text.startswith(change.kind) else f"{change.kind}: {text}"
