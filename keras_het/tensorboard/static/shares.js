// Shares of the chosen replicas over steps, drawn by uPlot.

import { inside } from "./api.js";
import { lineLook, lineStyle, theme } from "./colors.js";
import { card, element, empty, file, loaded } from "./dom.js";
import { count, number } from "./format.js";
import { LEFT, RIGHT } from "./plot.js";

const WHOLE_STEPS = Array.from({ length: 12 }, (_, power) => power).flatMap((power) =>
  [1, 2, 5].map((factor) => factor * 10 ** power),
);

let library = null;

// A plain script, as its authors publish it.
async function load() {
  if (!inside) {
    library ??= Promise.all([
      loaded("link", { rel: "stylesheet", href: file("uPlot.min.css") }),
      loaded("script", { src: file("uPlot.iife.min.js") }),
    ]);
    await library;
  }
  if (!window.uPlot) throw new Error("uPlot could not be loaded.");
  return window.uPlot;
}

export class Shares {
  constructor({ zoom }) {
    this.zoom = zoom;
    const parts = card("Shares");
    this.node = parts.whole;
    this.body = element("div"); // without padding: as wide as the other plots
    parts.body.append(this.body);
    this.chart = null;
    this.shown = null;
    load().catch(() => {}); // while the server answers; what went wrong is told when it is used
    new ResizeObserver(() => this.resize()).observe(this.body);
    parts.tools.append(element("span", { class: "note", text: "samples of the global batch" }));
  }

  async show(lanes, devices) {
    this.shown = [lanes, devices];
    const uPlot = await load();
    if (this.shown[0] !== lanes) return; // something newer has come meanwhile
    this.clear();
    const columns = lanes.edges.length - 1;
    if (!lanes.share.some((value) => Number.isFinite(value))) {
      this.body.replaceChildren(empty("No device is chosen, or there are no shares in these steps."));
      return;
    }
    const series = lanes.devices.map((device, place) => ({
      label: devices[device].name,
      ...lineLook(place),
      width: 1.75,
      paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
      value: (_, value) => number(value, 4),
    }));
    const values = lanes.devices.map((_, row) =>
      Array.from(lanes.share.subarray(row * columns, (row + 1) * columns), (value) =>
        Number.isFinite(value) ? value : null,
      ),
    );
    values.forEach((row) => row.push(row[columns - 1])); // a column continues to its right edge
    const axis = {
      stroke: theme("--muted"),
      grid: { stroke: theme("--grid"), width: 1 },
      ticks: { stroke: theme("--grid"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    this.body.replaceChildren();
    this.chart = new uPlot(
      {
        width: this.width,
        height: 240,
        padding: [10, RIGHT, 0, 0],
        scales: { x: { time: false, range: [lanes.edges[0], lanes.edges[columns]] } },
        cursor: { drag: { x: true, y: false, setScale: false } },
        legend: { markers: { width: 3, dash: (_, place) => lineStyle(place - 1) } },
        series: [{ label: "step", value: (_, value) => count(value ?? NaN) }, ...series],
        axes: [
          { ...axis, incrs: WHOLE_STEPS, values: (_, ticks) => ticks.map((tick) => count(tick)) },
          { ...axis, size: LEFT },
        ],
        hooks: {
          setSelect: [
            (chart) => {
              if (chart.select.width < 4) return;
              const first = Math.floor(chart.posToVal(chart.select.left, "x"));
              const last = Math.ceil(chart.posToVal(chart.select.left + chart.select.width, "x"));
              this.zoom(first, Math.max(last, first + 1));
            },
          ],
        },
      },
      [lanes.edges, ...values],
      this.body,
    );
  }

  get width() {
    return Math.max(this.body.clientWidth, 200);
  }

  resize() {
    if (this.chart && this.body.clientWidth) {
      this.chart.setSize({ width: this.width, height: 240 });
    }
  }

  // Its colours are fixed when it is made.
  redraw() {
    if (this.shown) this.show(...this.shown);
  }

  clear() {
    this.chart?.destroy();
    this.chart = null;
  }
}
