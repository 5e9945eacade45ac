// A quantity of all replicas over steps.

import { heat, theme } from "./colors.js";
import { card, element, empty, options } from "./dom.js";
import { quantity } from "./format.js";
import { Plot, columnTitle, sampledNote } from "./plot.js";

const HEIGHT = 420;
const LEAST_RANGE = 0.05;

// The values at both ends of the colours; never so near that noise looks like a difference.
function ends({ low, high }) {
  const missing = Math.max(LEAST_RANGE * Math.abs(high) - (high - low), 0) / 2;
  return [low - missing, high + missing];
}

export class HeatMap {
  constructor({ zoom, pick, choose }) {
    this.quantity = element("select", {
      "aria-label": "Quantity",
      onchange: () => choose(this.quantity.value, this.how.value),
    });
    this.how = element("select", {
      "aria-label": "Value of a column",
      onchange: () => choose(this.quantity.value, this.how.value),
    });
    options(this.how, [
      ["median", "median"],
      ["highest", "highest value"],
    ]);
    this.low = element("span");
    this.high = element("span");
    this.scale = element("canvas", { class: "scale", width: 120, height: 10 });
    this.plot = new Plot({ label: "Replicas over steps", zoom, pick: (row) => pick(this.first(row)) });
    const parts = card("Replicas over steps");
    this.node = parts.whole;
    this.body = parts.body;
    this.sampled = element("span", { class: "note" });
    parts.tools.append(
      this.sampled,
      element("span", { class: "legend" }, this.low, this.scale, this.high),
      this.quantity,
      this.how,
    );
    this.group = 1;
    this.drawScale();
  }

  // The first device of a row: a row may be several devices.
  first(row) {
    return row * this.group;
  }

  drawScale() {
    const context = this.scale.getContext("2d");
    for (let x = 0; x < 120; x += 1) {
      context.fillStyle = `rgb(${heat(x / 119).join()})`;
      context.fillRect(x, 0, 1, 10);
    }
  }

  choices(quantities, chosen) {
    options(
      this.quantity,
      quantities.map((each) => [each.name, each.title]),
      chosen,
    );
  }

  show(map, devices, changes, unit) {
    const known = map.low !== null;
    const [low, high] = known ? ends(map) : [0, 0];
    this.low.textContent = known ? quantity(low, unit) : "";
    this.high.textContent = known ? quantity(high, unit) : "";
    this.scale.hidden = !known;
    this.sampled.textContent = known ? sampledNote(map) : "";
    if (!known) {
      this.body.replaceChildren(empty("There are no values of this quantity in these steps."));
      return;
    }
    this.group = map.group;
    const columns = map.edges.length - 1;
    const rows = Array.from({ length: map.rows }, (_, row) => this.rowName(row, devices));
    const rowHeight = Math.min(Math.max(HEIGHT / map.rows, 3), 34);
    const image = this.image(map, columns, low, high - low);
    const at = (column, row) => map.values[row * columns + column];
    this.body.replaceChildren(this.plot.node);
    this.plot.show({
      edges: map.edges,
      sampled: map.sampled,
      rows,
      rowHeight,
      changes,
      paint: (context, area) => {
        context.imageSmoothingEnabled = false;
        context.fillStyle = theme("--missing");
        context.fillRect(area.left, area.top, area.width, area.height);
        context.drawImage(image, area.left, area.top, area.width, area.height);
      },
      describe: (column, row) => [
        rows[row],
        ...columnTitle(map, column),
        quantity(at(column, row), unit),
      ],
    });
  }

  rowName(row, devices) {
    const first = devices[row * this.group]?.name ?? "";
    const last = devices[Math.min((row + 1) * this.group, devices.length) - 1]?.name;
    return this.group > 1 && last !== first ? `${first} … ${last}` : first;
  }

  image(map, columns, low, range) {
    const canvas = element("canvas", { width: columns, height: map.rows });
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, map.rows);
    map.values.forEach((value, place) => {
      if (!Number.isFinite(value)) return;
      const color = heat(range > 0 ? (value - low) / range : 0.5);
      image.data.set([...color, 255], 4 * place);
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }
}
