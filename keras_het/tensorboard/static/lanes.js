// Where the time of each chosen replica goes, stacked, over steps.

import { PHASES } from "./api.js";
import { PHASE_COLORS, PHASE_TITLES, theme } from "./colors.js";
import { card, element, empty } from "./dom.js";
import { seconds } from "./format.js";
import { Plot, columnTitle, sampledNote } from "./plot.js";

const GAP = 4;

// The time that fills a lane: higher columns are cut, so that the steps that compile, or wait for
// the first batch of an epoch, do not flatten all others.
function fullHeight(wall) {
  const known = Array.from(wall)
    .filter((value) => Number.isFinite(value))
    .sort((one, other) => one - other);
  if (!known.length) return 0;
  const high = known[Math.floor(0.95 * (known.length - 1))];
  return Math.min(known[known.length - 1], 1.2 * high);
}

export class Lanes {
  constructor({ zoom }) {
    this.plot = new Plot({ label: "Where the time goes", zoom });
    const parts = card("Where the time goes");
    this.node = parts.whole;
    this.body = parts.body;
    this.height = element("span", { class: "note" });
    this.sampled = element("span", { class: "note" });
    parts.tools.append(
      this.sampled,
      this.height,
      element(
        "ul",
        { class: "phases" },
        ...PHASES.map((name) =>
          element(
            "li",
            {},
            element("i", { style: { background: PHASE_COLORS[name] } }),
            PHASE_TITLES[name],
          ),
        ),
      ),
    );
  }

  show(lanes, devices, changes) {
    const columns = lanes.edges.length - 1;
    const wall = lanes.compute.map((_, place) =>
      PHASES.reduce((sum, name) => sum + (lanes[name][place] || 0), 0),
    );
    const full = fullHeight(wall);
    this.height.textContent = full ? `a full lane is ${seconds(full)} or more` : "";
    this.sampled.textContent = sampledNote(lanes);
    if (!full) {
      this.body.replaceChildren(empty("No device is chosen, or there are no times in these steps."));
      return;
    }
    const rows = lanes.devices.map((device) => devices[device].name);
    const rowHeight = rows.length > 12 ? 30 : 40;
    this.body.replaceChildren(this.plot.node);
    this.plot.show({
      edges: lanes.edges,
      sampled: lanes.sampled,
      rows,
      rowHeight,
      changes,
      paint: (context, area) => {
        context.fillStyle = theme("--lane");
        rows.forEach((_, row) => {
          const top = area.top + row * rowHeight;
          context.fillRect(area.left, top + GAP / 2, area.width, rowHeight - GAP);
        });
        for (let column = 0; column < columns; column += 1) {
          // Whole pixels: parts of them would show as stripes.
          const left = Math.round(this.plot.place(lanes.edges[column]));
          const width = Math.round(this.plot.place(lanes.edges[column + 1])) - left;
          rows.forEach((_, row) => {
            this.column(context, lanes, row * columns + column, {
              left,
              width: width > 6 ? width - 1 : Math.max(width, 1),
              bottom: area.top + (row + 1) * rowHeight - GAP / 2,
              height: rowHeight - GAP,
              full,
            });
          });
        }
      },
      describe: (column, row) => [
        rows[row],
        ...columnTitle(lanes, column),
        ...PHASES.map(
          (name) => `${PHASE_TITLES[name]}: ${seconds(lanes[name][row * columns + column])}`,
        ),
      ],
    });
  }

  column(context, lanes, place, { left, width, bottom, height, full }) {
    let used = 0;
    for (const name of PHASES) {
      const value = lanes[name][place];
      if (!(value > 0)) continue;
      const part = Math.min((value / full) * height, height - used);
      context.fillStyle = PHASE_COLORS[name];
      context.fillRect(left, bottom - used - part, width, part);
      used += part;
    }
  }
}
