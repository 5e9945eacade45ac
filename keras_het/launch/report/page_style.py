"""The look of the page: light and dark, with colours that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Mapping

PHASE_COLOURS: Mapping[str, tuple[str, str]] = {
    "compute": ("#0072b2", "#4aa3df"),
    "input": ("#e69f00", "#f2b134"),
    "sync": ("#b9c4cd", "#3a434b"),
    "other": ("#4a4a4a", "#c9c9c9"),
}
"""Colours of the phases, light and dark; sync recedes, because it is waiting for others."""

LINE_COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#e8743b"),
    ("#009e73", "#00b88a"),
    ("#56b4e9", "#f0e442"),
    ("#cc79a7", "#e39ac6"),
    ("#222222", "#eeeeee"),
)
"""Colours of lines, light and dark, after Okabe and Ito; dashes tell lines apart as well."""

_DASHES = ("none", "none", "80 30", "80 30", "25 25", "25 25")
_THEMES = (
    {"page": "#ffffff", "ink": "#1c2126", "soft": "#5b6670", "grid": "#e4e8ec", "card": "#f5f7f9"},
    {"page": "#14181c", "ink": "#e8ebee", "soft": "#a3adb6", "grid": "#2b333a", "card": "#1d2329"},
)
_BARS = (("#5b6670", "#a3adb6"), ("#0072b2", "#4aa3df"), ("#e69f00", "#f2b134"))
_SEVERE = ("#b3261e", "#ff8a80")
_WARNING = ("#7a5200", "#ffc766")
_GOOD = ("#00674a", "#4fd0a5")

_RULES = """
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: 0 }
h2 { font-size: 1.05rem; margin: 0 }
p { margin: .2rem 0 }
figure { margin: 2rem 0 0 }
figcaption p, .soft { color: var(--soft); font-size: .9rem }
.verdict { list-style: none; margin: 1rem 0; padding: 0 }
.verdict li { background: var(--card); border-left: 5px solid var(--soft); padding: .6rem .9rem;
  margin: .4rem 0 }
.verdict .critical { border-color: var(--severe) }
.verdict .note { border-color: var(--warning) }
.verdict .good { border-color: var(--good) }
.verdict b { font-weight: 600 }
.scroll { overflow-x: auto }
svg { display: block; width: 100%; min-width: 720px; height: auto; font: 12px system-ui, sans-serif;
  fill: var(--ink) }
text.end { text-anchor: end }
text.middle { text-anchor: middle }
.axis { stroke: var(--soft); fill: none }
.grid { stroke: var(--grid); fill: none }
.mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 2 4; fill: none }
.line { fill: none; stroke-width: 20; stroke-linejoin: round }
.rest { stroke: var(--soft); opacity: .3; stroke-width: 8 }
.band { fill: var(--s0); opacity: .22 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem;
  width: 100%; margin-top: .5rem }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--grid);
  white-space: nowrap }
th { color: var(--soft); font-weight: 600 }
td.text, th.text { text-align: left; white-space: normal; min-width: 13rem }
text.value { paint-order: stroke; stroke: var(--page); stroke-width: 5px; stroke-linejoin: round }
"""


def style() -> str:
    """Return the style sheet."""
    pairs = {f"c-{name}": pair for name, pair in PHASE_COLOURS.items()}
    pairs |= {f"s{index}": pair for index, pair in enumerate(LINE_COLOURS)}
    pairs |= {f"bar{index}": pair for index, pair in enumerate(_BARS)}
    pairs |= {"severe": _SEVERE, "warning": _WARNING, "good": _GOOD}
    themes = []
    for index, colours in enumerate(_THEMES):
        values = {**colours, **{name: pair[index] for name, pair in pairs.items()}}
        variables = ";".join(f"--{name}:{value}" for name, value in values.items())
        themes.append(f":root{{color-scheme:{('light', 'dark')[index]};{variables}}}")
    rules = [f".{name}{{fill:var(--c-{name})}}" for name in PHASE_COLOURS]
    for index in range(len(LINE_COLOURS)):
        rules.append(f".s{index}{{stroke:var(--s{index});stroke-dasharray:{_DASHES[index]}}}")
    rules += [f".{kind}{{fill:var(--bar{n})}}" for n, kind in enumerate(("now", "repair", "phase"))]
    light, dark = themes
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}{_RULES}{''.join(rules)}"
