"""An HTML page about data and its shards, made from TFDV's notebook displays."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_het.loader.validation.shard_comparison import num_rows, validate_against
from keras_het.loader.validation.tfdv_adapter import (
    Schema,
    Statistics,
    display_util,
    tfdv,
)

_STYLE = """
body { font-family: sans-serif; margin: 2em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border: 1px solid #ccc; padding: 0.3em 0.6em; text-align: left; }
iframe { width: 100%; height: 750px; border: 1px solid #ccc; }
"""


def write_report(
    path: str | Path,
    data: Mapping[str, Statistics],
    schema: Schema | None = None,
    reference: str | None = None,
    title: str = "Data validation",
) -> None:
    """Write a page with the statistics of data sets or shards, compared with one of them.

    The tables of anomalies and distances, and the charts, are TFDV's own. The charts (Facets) are
    loaded from the internet when the page is opened; the tables are part of the page.

    Args:
        path: the file, `report.html`.
        data: names to statistics.
        schema: what the data should look like; without it there are only the charts.
        reference: the data to compare the others with, by default the one with most rows.
        title: the page's title.

    Raises:
        ValueError: if there is no data, or no such reference.

    Reference: `tensorflow_data_validation.utils.display_util.get_statistics_html`.
    """
    filled = {name: statistics for name, statistics in data.items() if num_rows(statistics)}
    if not filled:
        raise ValueError(f"There is nothing to show: no rows in {sorted(data)}.")
    reference = reference or max(filled, key=lambda name: num_rows(filled[name]))
    if reference not in filled:
        raise ValueError(f"There is no reference {reference!r} among {sorted(filled)}.")
    parts = [f"<h1>{html.escape(title)}</h1>", _rows(data)]
    if schema is not None:
        parts += [_tables(name, filled, schema, reference) for name in filled]
    others: list[str | None] = [name for name in filled if name != reference]
    parts += [_charts(filled, reference, other) for other in others or [None]]
    page = f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
    page += f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    Path(path).write_text(page, encoding="utf-8")


def _rows(data: Mapping[str, Statistics]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{num_rows(statistics)}</td></tr>"
        for name, statistics in data.items()
    )
    return f"<table><tr><th>data</th><th>rows</th></tr>{rows}</table>"


def _tables(name: str, data: Mapping[str, Statistics], schema: Schema, reference: str) -> str:
    other = data[reference] if name != reference else None
    found = validate_against(data[name], schema, other)
    anomalies = display_util.get_anomalies_dataframe(found)
    parts = [f"<h2>{html.escape(name)}</h2>"]
    parts.append(_table(anomalies) if len(anomalies) else "<p>No anomalies.</p>")
    if len(found.drift_skew_info):
        parts.append(f"<p>Distances from {html.escape(reference)}:</p>")
        parts.append(_table(display_util.get_drift_skew_dataframe(found)))
    return "".join(parts)


def _table(frame: Any) -> str:
    return str(frame.to_html())


def _charts(data: Mapping[str, Statistics], reference: str, other: str | None) -> str:
    heading = reference if other is None else f"{reference} and {other}"
    charts = tfdv.get_statistics_html(
        data[reference],
        None if other is None else data[other],
        lhs_name=reference,
        rhs_name=other or "",
    )
    # Each in a separate document: TFDV's script knows only one chart.
    document = html.escape(charts, quote=True)
    return f'<h2>{html.escape(heading)}</h2><iframe srcdoc="{document}"></iframe>'
