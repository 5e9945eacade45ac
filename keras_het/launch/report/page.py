"""A report as one HTML page, which needs no script and no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from keras_het.launch.report.bars import what_if_bars
from keras_het.launch.report.curves import shares_over_time, step_time
from keras_het.launch.report.facts import Facts
from keras_het.launch.report.lanes import lanes
from keras_het.launch.report.page_style import style
from keras_het.launch.report.wording import (
    change_text,
    device_numbers,
    exchange_lines,
    gain_line,
    missing_lines,
    summary_line,
)
from keras_het.planning.diagnosis.recording import PHASES

_MOST_CHANGES = 300
# Nothing may be loaded or run, whatever has slipped in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(facts: Facts) -> str:
    """Return the page."""
    title = html.escape(f"keras_het: {facts.run}")
    body = [
        f"<h1>{html.escape(facts.run)}</h1>",
        _paragraph(summary_line(facts), "soft"),
        _verdict(facts),
        _paragraph(gain_line(facts)),
        _plan(facts),
        what_if_bars(facts),
        step_time(facts),
        shares_over_time(facts),
        lanes(facts),
        _devices(facts),
        _list("Async workers", exchange_lines(facts)),
        _changes(facts),
        _list("The log", facts.messages),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style()}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _verdict(facts: Facts) -> str:
    items = []
    for index, line in enumerate(facts.verdict.lines):
        causes = facts.verdict.causes
        kind = causes[index].severity if index < len(causes) else "good"
        items.append(f'<li class="{kind}"><b>{html.escape(line)}</b></li>')
    items += [f"<li>{html.escape(line)}</li>" for line in missing_lines(facts)]
    return f'<ul class="verdict">{"".join(items)}</ul>\n' if items else ""


def _plan(facts: Facts) -> str:
    if not facts.plan:
        return ""
    text = html.escape("\n".join(facts.plan))
    return (
        "<figure><figcaption><h2>Plan of the pipeline</h2></figcaption>"
        f'<div class="scroll"><pre>{text}</pre></div></figure>\n'
    )


def _devices(facts: Facts) -> str:
    if not facts.devices:
        return ""
    heads = ["share", "samples/s", *(f"{name} ms" for name in PHASES), "vs fastest", "vs own best"]
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = []
    for each in facts.devices:
        numbers = "".join(f"<td>{html.escape(value)}</td>" for value in device_numbers(each))
        known = ", ".join(filter(None, (each.device.model, each.hardware)))
        more = f'<br><span class="soft">{html.escape(known)}</span>' if known else ""
        name = f'<td class="text">{html.escape(each.device.name)}{more}</td>'
        rows.append(f"<tr><td>{each.index}</td>{name}{numbers}</tr>")
    return (
        f"<figure><figcaption><h2>Devices</h2><p>Means of {facts.of_recent}. Samples/s: while it "
        "computes. Scores: its speed, compared with the fastest device and with its own best "
        "steps, from 0 to 1.</p></figcaption>"
        '<div class="scroll"><table><thead><tr><th>#</th><th class="text">device</th>'
        f"{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></figure>\n"
    )


def _changes(facts: Facts) -> str:
    changes = facts.recording.changes
    lines = [f"step {each.step}: {change_text(each)}" for each in changes[-_MOST_CHANGES:]]
    title = f"What was changed ({len(changes)})"
    if len(changes) > len(lines):
        title += f", the latest {len(lines)}"
    return _list(title, lines)


def _list(title: str, lines: Sequence[str] | Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    if not items:
        return ""
    return (
        f"<figure><figcaption><h2>{html.escape(title)}</h2></figcaption><ul>{items}</ul></figure>\n"
    )


def _paragraph(content: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f"<p{name}>{html.escape(content)}</p>\n" if content else ""
