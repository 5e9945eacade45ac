// A model in stages: the plan, and what each device does when in one step, predicted and measured.

import { PASS_COLORS, PASS_TITLES } from "./colors.js";
import { card, element, empty } from "./dom.js";
import { count, decimalBytes, number, seconds } from "./format.js";

const TICKS = 8;
const LABEL_PIXELS = 16; // room that the number of a micro-batch needs
const USUAL_WIDTH = 900;
const THIN = new Set(["transfer", "all_reduce"]); // at the same time as passes

export class Pipeline {
  constructor() {
    const parts = card("Pipeline");
    this.node = parts.whole;
    this.node.hidden = true;
    this.body = parts.body;
    this.step = element("span", { class: "note" });
    parts.tools.append(this.step, legend());
    this.tip = element("div", { class: "tip", hidden: true });
    this.chart = element("div", {
      class: "gantt",
      onmousemove: (event) => this.point(event),
      onmouseleave: () => {
        this.tip.hidden = true;
      },
    });
  }

  show(answer) {
    this.node.hidden = !answer.stages.length;
    if (this.node.hidden) return;
    const { predicted, measured } = answer;
    this.described = [];
    this.tip.hidden = true;
    this.step.textContent = measured ? `measured: step ${count(measured.step)}` : "";
    this.body.replaceChildren(table(answer));
    const longest = Math.max(predicted?.step_seconds ?? 0, measured?.step_seconds ?? 0);
    if (!(longest > 0)) {
      this.body.append(empty("The passes of a step are not known yet."));
      return;
    }
    const rows = [];
    const used = new Set(answer.stages.flatMap((stage) => stage.devices));
    answer.devices.forEach((name, device) => {
      if (!used.has(device)) return;
      const lanes = [
        ["predicted", predicted],
        ["measured", measured],
      ].filter(([, timeline]) => timeline?.step_seconds > 0);
      rows.push(element("div", { class: "gantt-name", text: name, title: name }));
      for (const [how, timeline] of lanes) {
        rows.push(...this.lane(name, how, timeline, device, longest));
      }
    });
    this.chart.replaceChildren(...rows, ...axis(longest), this.tip);
    this.body.append(this.chart);
    const unused = answer.devices.filter((_, device) => !used.has(device));
    const notes = [
      measured ? "Measured: backward includes recomputation, idle includes transfers." : "",
      unused.length ? `Without a stage: ${unused.join(", ")}.` : "",
      predicted?.cut || measured?.cut ? "Only the first passes of each device are drawn." : "",
    ].filter(Boolean);
    this.body.append(element("p", { class: "note", text: notes.join(" ") }));
  }

  // A lane of a device: its label, its passes, how long it is idle.
  lane(name, how, timeline, device, longest) {
    const idle = timeline.idle[device];
    const part = idle / timeline.step_seconds;
    const share = (value) => `${(100 * value) / longest}%`;
    const lines = [
      `${name}, ${how}`,
      `idle: ${seconds(idle)}, ${number(100 * part, 2)} % of the step`,
    ];
    const track = element("div", {
      class: "gantt-track",
      role: "img",
      "aria-label": lines.join(", "),
    });
    const whole = element("i", {
      class: "gantt-idle",
      style: { width: share(timeline.step_seconds) },
    });
    this.describe(whole, lines);
    track.append(whole);
    for (const [kind, microBatch, stage, begin, end] of timeline.events[device]) {
      const length = end - begin;
      const hasRoom = (length / longest) * USUAL_WIDTH > LABEL_PIXELS;
      const bar = element("i", {
        class: THIN.has(kind) ? "thin" : "",
        style: {
          left: share(begin),
          width: share(length),
          background: PASS_COLORS[kind] ?? "",
        },
        text: hasRoom && !THIN.has(kind) ? String(microBatch) : "",
      });
      this.describe(bar, [
        `${PASS_TITLES[kind] ?? kind}${ofMicroBatch(microBatch)}, stage ${stage}`,
        `${seconds(length)}, from ${seconds(begin)} to ${seconds(end)}`,
        `${name}, ${how}`,
      ]);
      track.append(bar);
    }
    return [
      element("div", { class: "gantt-how", text: how }),
      track,
      element("div", { class: "gantt-part", text: `idle ${number(100 * part, 2)} %` }),
    ];
  }

  describe(node, lines) {
    node.dataset.number = String(this.described.length);
    this.described.push(lines);
  }

  point(event) {
    const lines = this.described[event.target.dataset?.number];
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.replaceChildren(...lines.map((text) => element("div", { text })));
    const area = this.chart.getBoundingClientRect();
    const left = Math.min(event.clientX - area.left + 14, area.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(left, 0)}px`;
    this.tip.style.top = `${event.clientY - area.top + 16}px`;
  }
}

// An all-reduce is of none.
function ofMicroBatch(number) {
  return number < 0 ? "" : ` of micro-batch ${number}`;
}

function legend() {
  const entries = [...Object.entries(PASS_COLORS), ["idle", null]];
  return element(
    "ul",
    { class: "phases" },
    ...entries.map(([kind, color]) =>
      element(
        "li",
        {},
        element("i", color ? { style: { background: color } } : { class: "gantt-idle" }),
        PASS_TITLES[kind],
      ),
    ),
  );
}

function table({ stages, devices }) {
  const heads = ["stage", "layers", "device", "micro-batches", "computed again", "memory, predicted"];
  const isNumber = (place) => place === 0 || place === 3 || place === 5;
  const cell = (tag, text, place) =>
    element(tag, { class: isNumber(place) ? "number" : "", text, title: text });
  const rows = stages.flatMap((stage, position) =>
    stage.devices.map((device, replica) =>
      element(
        "tr",
        {},
        ...[
          replica ? "" : String(position),
          replica ? "" : span(stage.layers),
          devices[device] ?? "",
          count(stage.micro_batches[replica] ?? NaN),
          replica ? "" : again(stage),
          decimalBytes(stage.memory_bytes[replica] ?? NaN),
        ].map((text, place) => cell("td", text, place)),
      ),
    ),
  );
  return element(
    "div",
    { class: "scroll" },
    element(
      "table",
      { class: "plan" },
      element("thead", {}, element("tr", {}, ...heads.map((text, place) => cell("th", text, place)))),
      element("tbody", {}, ...rows),
    ),
  );
}

function span(layers) {
  return layers.length > 1
    ? `${layers[0]} … ${layers[layers.length - 1]} (${count(layers.length)})`
    : (layers[0] ?? "");
}

function again({ layers, recomputed }) {
  if (!recomputed.length) return "none";
  if (recomputed.length === layers.length) return "all";
  return recomputed.length > 3 ? `${count(recomputed.length)} layers` : recomputed.join(", ");
}

function axis(longest) {
  const least = longest / TICKS;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least);
  const ticks = [];
  for (let tick = 0; tick * step <= longest * 0.97; tick += 1) {
    const left = `${(100 * tick * step) / longest}%`;
    ticks.push(element("span", { style: { left }, text: tick ? seconds(tick * step) : "0" }));
  }
  return [element("div", { class: "gantt-axis" }, ...ticks)];
}
