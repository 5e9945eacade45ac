"""The tab as one file that opens without a server: the same page and script, the log inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import re
import time
from typing import Any

from keras_het.tensorboard import views
from keras_het.tensorboard.log_content import LogContent
from keras_het.tensorboard.log_format import ROWS

_STATIC = importlib.resources.files(__package__) / "static"
# Of 50 devices the page has as many columns as the tab; of more, so many that it has a few MB.
_MOST_CELLS = 1_000_000
_LEAST_COLUMNS = 60
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


def report_page(run: str, content: LogContent) -> str:
    """Return the page about a training; it loads nothing, and runs its own scripts only."""
    # the log is in it as base64, in which nothing can end an element
    style, scripts = (
        _text("style.css") + _text("uPlot.min.css"),
        (_text("uPlot.iife.min.js"), _script()),
    )
    packed = gzip.compress(json.dumps(_answers(run, content), allow_nan=False).encode(), mtime=0)
    allowed = " ".join(map(_hash, scripts))
    library, script = scripts
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; \
form-action 'none'; script-src {allowed}; style-src {_hash(style)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>keras_het</title><style>{style}</style></head><body>
<script id="log" type="application/gzip">{base64.b64encode(packed).decode()}</script>
<script>{library}</script>
<script type="module">{script}</script>
</body></html>
"""


def _answers(run: str, content: LogContent) -> dict[str, Any]:
    """What the tab's routes answer about all steps, with fewer columns where it would be much."""
    overview = {**views.overview(content, content), "messages": content.messages}
    names = [each["name"] for each in overview["quantities"]]
    devices = range(len(content.recording.devices))
    map_rows = len(views.HOW) * len(names) * min(len(devices), views.MOST_ROWS)
    columns = max(_MOST_CELLS // map_rows, _LEAST_COLUMNS)
    lane_columns = max(_MOST_CELLS // (len(ROWS) * len(devices)), _LEAST_COLUMNS)
    return {
        "runs": {"runs": [{"name": run, "written": time.time()}]},
        "overview": overview,
        "diagnosis": views.diagnosis(content),
        "pipeline": views.pipeline(content),
        "lanes": views.lanes(content, devices, lane_columns),
        "heat_map": {
            name: {how: views.heat_map(content, name, how, columns) for how in views.HOW}
            for name in names
        },
    }


def _script() -> str:
    """The modules of the page as one, each after those that it imports."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        text = _text(f"{name}.js")
        for imported in _IMPORT.findall(text):
            if imported not in found:
                add(imported)
        found[name] = re.sub("^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add("index")
    return "".join([*found.values(), "render();\n"])


def _text(name: str) -> str:
    return (_STATIC / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest())
    return f"'sha256-{digest.decode()}'"
