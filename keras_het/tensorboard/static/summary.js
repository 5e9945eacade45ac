// The verdict, what the time of a step is and what would change it.

import { PHASE_TITLES } from "./colors.js";
import { card, element, empty } from "./dom.js";
import { number, seconds, steps } from "./format.js";

const MOST_BARS = 8;
const LEAST_SAVING = 0.005;

export class Verdict {
  constructor() {
    this.lines = element("div", { class: "lines" });
    this.facts = element("dl", { class: "facts" });
    this.messages = element("ul", { class: "messages" });
    this.node = element(
      "section",
      { class: "card verdict", "aria-label": "Verdict" },
      this.lines,
      this.facts,
      this.messages,
    );
  }

  // Without a diagnosis, which takes longer than the rest, it says that one is coming.
  show(overview, diagnosis) {
    this.node.setAttribute("aria-busy", String(!diagnosis));
    if (diagnosis) {
      const missing = diagnosis.missing ?? [];
      const without = missing.length ? "No verdict." : nothingToSay(overview);
      const lines = diagnosis.verdict.length ? diagnosis.verdict : [without];
      this.lines.replaceChildren(
        ...lines.map((text, place) => element("p", { class: place ? "" : "first", text })),
        ...missing.map((text) => element("p", { class: "note", text: sentence(text) })),
      );
    } else if (!this.lines.children.length) {
      this.lines.replaceChildren(element("p", { class: "note", text: "Looking for a cause …" }));
    }
    this.facts.replaceChildren(
      ...[
        [
          "step",
          seconds(overview.step_seconds ?? NaN),
          `${overview.thinned ? "later ones by their medians" : "stalls included"}; median ${seconds(
            overview.median_seconds ?? NaN,
          )}`,
        ],
        ["samples a second", number(overview.samples_per_second ?? NaN), "all replicas together"],
        [
          "between epochs",
          seconds(overview.pause_seconds ?? NaN),
          `${overview.pauses === 1 ? "1 pause" : `${overview.pauses} pauses`}; no part of a step`,
        ],
        ["balancing", gain(diagnosis?.gain), `compared with even shares${lately(diagnosis)}`],
      ].map(([name, value, note]) =>
        element(
          "div",
          {},
          element("dt", { text: name }),
          element("dd", { text: value }),
          element("dd", { class: "note", text: note }),
        ),
      ),
    );
    this.messages.replaceChildren(
      ...overview.messages.map((text) => element("li", { text })),
    );
  }
}

// The steps that the diagnosis is about.
function lately(diagnosis) {
  const [first, last] = diagnosis?.what_if?.steps ?? [];
  return last > first ? `, ${steps(first, last + 1)}` : "";
}

function nothingToSay(overview) {
  return overview.last > overview.first
    ? `There is nothing to say about ${steps(overview.first, overview.last)} yet.`
    : "This training has written no steps yet. They come a few seconds after its first steps.";
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function gain(factor) {
  if (!Number.isFinite(factor ?? NaN)) return "–";
  if (factor >= 0.995 && factor <= 1.005) return "no change";
  const percent = Math.abs(100 * (factor - 1));
  if (factor >= 2) return `${number(factor)}× as fast`;
  return `${number(percent, 2)} % ${factor > 1 ? "faster" : "slower"}`;
}

export class WhatIf {
  constructor() {
    const parts = card("What if it were ideal?");
    this.node = parts.whole;
    this.body = parts.body;
    this.note = element("span", { class: "note" });
    parts.tools.append(this.note);
  }

  show(overview, diagnosis) {
    const costs = diagnosis?.what_if;
    this.note.textContent = `how much shorter a step would be${lately(diagnosis)}, without stalls`;
    if (!diagnosis) {
      this.body.replaceChildren(empty("Computing …"));
      return;
    }
    if (!costs || !Number.isFinite(costs.step_seconds ?? NaN)) {
      this.body.replaceChildren(
        empty("This needs a few whole steps: those that compile and partial batches do not count."),
      );
      return;
    }
    const now = costs.step_seconds;
    const groups = [
      ["a phase", Object.entries(costs.by_phase).map(([name, to]) => [phase(name), to])],
      ["a worker", Object.entries(costs.by_worker).map(([name, to]) => [`worker ${name}`, to])],
      ["a device", costs.by_device.map((to, place) => [overview.devices[place].name, to])],
    ].map(([title, bars]) => [
      title,
      bars
        .filter(([, to]) => Number.isFinite(to ?? NaN))
        .map(([name, to]) => ({ name, to, saved: Math.max(1 - to / now, 0) }))
        .sort((one, other) => other.saved - one.saved),
    ]);
    const most = Math.max(...groups.flatMap(([, bars]) => bars.map((bar) => bar.saved)), 0.05);
    this.body.replaceChildren(
      ...groups.map(([title, bars]) => this.group(title, bars, most, now)),
    );
  }

  group(title, bars, most, now) {
    const shown = bars.filter((bar) => bar.saved >= LEAST_SAVING).slice(0, MOST_BARS);
    const rest = bars.length - shown.length;
    return element(
      "div",
      { class: "bars" },
      element("h3", { text: `Only ${title}` }),
      ...shown.map((bar) =>
        element(
          "div",
          { class: "bar", title: `${seconds(now)} would become ${seconds(bar.to)}` },
          element("span", { class: "name", text: bar.name }),
          element(
            "span",
            { class: "track" },
            element("i", { style: { width: `${(100 * bar.saved) / most}%` } }),
          ),
          element("span", { class: "value", text: `−${number(100 * bar.saved, 2)} %` }),
        ),
      ),
      rest
        ? element("p", {
            class: "note",
            text: `${shown.length ? `${rest} more` : `none of ${rest}`}: ${
              bars[shown.length].saved >= LEAST_SAVING ? "less than these" : "under 0.5 %"
            }`,
          })
        : null,
    );
  }
}

function phase(name) {
  return name === "sync" ? "transfer" : (PHASE_TITLES[name] ?? name);
}
