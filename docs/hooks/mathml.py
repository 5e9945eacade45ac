"""Turns the formulas of a page into MathML, which browsers show without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs calls this with the HTML of each page."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    formula = html.unescape(found[2]).strip()
    display = "block" if formula.startswith(r"\[") else "inline"
    return convert(formula[2:-2].strip(), display=display)
