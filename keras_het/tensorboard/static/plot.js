// Rows over steps on a canvas: axis, marks of changes, hover, zoom and keyboard.

import { theme } from "./colors.js";
import { element } from "./dom.js";
import { count, steps } from "./format.js";

export const LEFT = 150;
export const RIGHT = 18;
const TOP = 16;
const BOTTOM = 24;
const LABEL_HEIGHT = 13;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function tickStep(span, room) {
  const least = span / Math.max(room / 60, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least) ?? power;
}

export class Plot {
  // `zoom(first, last)` is called with nulls for everything; `pick(row)` with the chosen row.
  constructor({ label, zoom, pick }) {
    this.zoom = zoom;
    this.pick = pick;
    this.content = null;
    this.cell = null;
    this.canvas = element("canvas", {
      tabIndex: 0,
      role: "application",
      "aria-label": `${label}. Arrow keys move, plus and minus zoom, Escape shows all steps${
        pick ? ", Enter chooses the device" : ""
      }.`,
    });
    this.band = element("div", { class: "band", hidden: true });
    this.cursor = element("div", { class: "cursor", hidden: true });
    this.tip = element("div", { class: "tip", hidden: true });
    this.spoken = element("div", { class: "spoken", "aria-live": "polite" });
    this.node = element(
      "div",
      { class: "plot" },
      this.canvas,
      this.band,
      this.cursor,
      this.tip,
      this.spoken,
    );
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.listen();
  }

  // content: {edges, sampled, rows: [label], rowHeight, changes, paint(context, area), describe(column, row)}
  show(content) {
    this.content = content;
    this.forget();
    this.draw();
  }

  get area() {
    const { rows, rowHeight } = this.content;
    const width = Math.max(this.node.clientWidth - LEFT - RIGHT, 10);
    return { left: LEFT, top: TOP, width, height: rows.length * rowHeight };
  }

  get span() {
    const { edges } = this.content;
    return [edges[0], edges[edges.length - 1]];
  }

  place(step) {
    const [first, last] = this.span;
    return LEFT + ((step - first) / (last - first)) * this.area.width;
  }

  draw() {
    if (!this.content || !this.node.clientWidth) return;
    const area = this.area;
    const width = this.node.clientWidth;
    const height = TOP + area.height + BOTTOM;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    this.content.paint(context, area);
    this.drawSampled(context, area);
    this.drawLabels(context, area);
    this.drawAxis(context, area);
    this.drawChanges(context, area);
  }

  // Steps that were not measured have the values of one that was: they must not look like it.
  drawSampled(context, area) {
    const { edges, sampled } = this.content;
    if (!sampled) return;
    context.fillStyle = context.createPattern(hatch(), "repeat");
    sampled.forEach(([unmeasured], column) => {
      if (!unmeasured) return;
      const left = Math.round(this.place(edges[column]));
      const width = Math.round(this.place(edges[column + 1])) - left;
      context.fillRect(left, area.top, Math.max(width, 1), area.height);
    });
  }

  drawLabels(context, area) {
    const { rows, rowHeight } = this.content;
    const every = Math.max(Math.ceil(LABEL_HEIGHT / rowHeight), 1);
    context.fillStyle = theme("--text");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = 0; row < rows.length; row += every) {
      let text = rows[row];
      while (text.length > 4 && context.measureText(text).width > LEFT - 14) {
        text = `${text.replace("…", "").slice(0, -1)}…`;
      }
      context.fillText(text, LEFT - 8, area.top + (row + 0.5) * rowHeight);
    }
  }

  drawAxis(context, area) {
    const [first, last] = this.span;
    const step = tickStep(last - first, area.width);
    const bottom = area.top + area.height;
    context.fillStyle = context.strokeStyle = theme("--muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (let tick = Math.ceil(first / step) * step; tick < last; tick += step) {
      const x = this.place(tick);
      context.fillRect(x, bottom, 1, 4);
      if (x < LEFT + area.width - 14) context.fillText(count(tick), x, bottom + 7);
    }
    context.textAlign = "right";
    context.fillText("step", LEFT - 24, bottom + 7);
  }

  drawChanges(context, area) {
    const [first, last] = this.span;
    context.fillStyle = theme("--mark");
    const drawn = new Set();
    for (const change of this.content.changes ?? []) {
      const x = Math.round(this.place(change.step));
      if (change.step < first || change.step >= last || drawn.has(x)) continue;
      drawn.add(x);
      context.beginPath();
      context.moveTo(x - 4, 4);
      context.lineTo(x + 4, 4);
      context.lineTo(x, 12);
      context.fill();
      context.globalAlpha = 0.7;
      context.fillRect(x - 0.5, 10, 1, area.height + TOP - 10);
      context.globalAlpha = 1;
    }
  }

  listen() {
    let start = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      const cell = this.at(event);
      if (!cell || event.button) return;
      start = { ...cell, x: event.offsetX };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const cell = this.at(event);
      if (start && cell && Math.abs(event.offsetX - start.x) > 4) this.select(start, cell);
      this.move(cell, event.offsetX, event.offsetY);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const cell = this.at(event, true);
      if (start && cell) {
        if (Math.abs(event.offsetX - start.x) > 4) {
          const { edges } = this.content;
          const columns = [start.column, cell.column].sort((one, other) => one - other);
          this.zoom(edges[columns[0]], edges[columns[1] + 1]);
        } else if (this.pick) {
          this.pick(cell.row);
        }
      }
      start = null;
      this.band.hidden = true;
    });
    this.canvas.addEventListener("pointercancel", () => {
      start = null;
      this.band.hidden = true;
    });
    this.canvas.addEventListener("pointerleave", () => this.forget());
    this.canvas.addEventListener("dblclick", () => this.zoom(null, null));
    this.canvas.addEventListener("blur", () => this.forget());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.content || event.ctrlKey || event.metaKey || event.altKey) return;
    const { edges, rows } = this.content;
    const columns = edges.length - 1;
    const cell = this.cell ?? { column: Math.floor(columns / 2), row: 0 };
    const move = MOVES[event.key];
    if (move) {
      const stride = event.shiftKey ? 10 : 1;
      cell.column = Math.min(Math.max(cell.column + move[0] * stride, 0), columns - 1);
      cell.row = Math.min(Math.max(cell.row + move[1] * stride, 0), rows.length - 1);
      const x = this.place((edges[cell.column] + edges[cell.column + 1]) / 2);
      this.move(cell, x, TOP + (cell.row + 1) * this.content.rowHeight);
      this.spoken.textContent = this.content.describe(cell.column, cell.row).join(", ");
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const [first, last] = this.span;
      const half = ((last - first) * (event.key === "-" ? 2 : 0.5)) / 2;
      const middle = (edges[cell.column] + edges[cell.column + 1]) / 2;
      const begin = Math.max(Math.floor(middle - half), 0);
      this.zoom(begin, Math.max(Math.ceil(middle + half), begin + 1));
    } else if (event.key === "Escape" || event.key === "0") {
      this.zoom(null, null);
    } else if (event.key === "Enter" && this.pick) {
      this.pick(cell.row);
    } else {
      return;
    }
    event.preventDefault();
  }

  // The cell under the pointer; with `near`, the nearest one.
  at(event, near = false) {
    if (!this.content) return null;
    const { edges, rows, rowHeight } = this.content;
    const area = this.area;
    let x = (event.offsetX - area.left) / area.width;
    const row = Math.floor((event.offsetY - area.top) / rowHeight);
    const inside = x >= 0 && x < 1 && row >= 0 && row < rows.length;
    if (!inside && !near && !event.buttons) return null;
    x = Math.min(Math.max(x, 0), 0.999999);
    const [first, last] = this.span;
    const step = first + x * (last - first);
    let column = Math.floor(x * (edges.length - 1));
    while (column > 0 && edges[column] > step) column -= 1;
    while (column < edges.length - 2 && edges[column + 1] <= step) column += 1;
    return { column, row: Math.min(Math.max(row, 0), rows.length - 1) };
  }

  select(one, other) {
    const { edges } = this.content;
    const columns = [one.column, other.column].sort((a, b) => a - b);
    const left = this.place(edges[columns[0]]);
    this.box(this.band, left, TOP, this.place(edges[columns[1] + 1]) - left, this.area.height);
  }

  box(node, left, top, width, height) {
    node.hidden = false;
    Object.assign(node.style, {
      left: `${left}px`,
      top: `${top}px`,
      width: `${Math.max(width, 2)}px`,
      height: `${Math.max(height, 2)}px`,
    });
  }

  move(cell, x, y) {
    if (!cell) return this.forget();
    this.cell = cell;
    const { edges, rowHeight } = this.content;
    const left = this.place(edges[cell.column]);
    const width = this.place(edges[cell.column + 1]) - left;
    this.box(this.cursor, left, TOP + cell.row * rowHeight, width, rowHeight);
    const lines = [
      ...this.content.describe(cell.column, cell.row),
      ...this.changesIn(cell.column).map((change) => `▼ ${change.text}`),
    ];
    this.tip.replaceChildren(...lines.map((text) => element("div", { text })));
    this.tip.hidden = false;
    const room = this.node.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(Math.min(x + 14, room), 0)}px`;
    this.tip.style.top = `${y + 16}px`;
    return undefined;
  }

  // Changes within a few pixels of a column: a column may be a pixel wide.
  changesIn(column) {
    const { edges, changes } = this.content;
    const [first, last] = this.span;
    const near = (3 / this.area.width) * (last - first);
    return (changes ?? [])
      .filter(({ step }) => step >= edges[column] - near && step < edges[column + 1] + near)
      .slice(0, 3);
  }

  forget() {
    this.cell = null;
    for (const node of [this.cursor, this.tip]) node.hidden = true;
  }
}

export function columnTitle({ edges, sampled }, column) {
  const note = sampled?.[column][1];
  const title = steps(edges[column], edges[column + 1]);
  return note ? [title, note] : [title];
}

const HATCH = 6;

// What the hatching means, empty where all steps were measured.
export function sampledNote({ sampled }) {
  return sampled?.some(([unmeasured]) => unmeasured)
    ? "Hatched: steps that were not measured; they have the values of the next one that was."
    : "";
}

function hatch() {
  const canvas = element("canvas", { width: HATCH, height: HATCH });
  const context = canvas.getContext("2d");
  context.strokeStyle = theme("--card");
  context.lineWidth = 1.5;
  context.beginPath();
  for (const x of [-HATCH, 0, HATCH]) {
    context.moveTo(x, HATCH);
    context.lineTo(x + HATCH, 0);
  }
  context.stroke();
  return canvas;
}
