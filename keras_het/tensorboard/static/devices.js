// The table of devices with their two scores; what was changed; exchanges of async workers.

import { card, element, empty } from "./dom.js";
import { count, number, seconds } from "./format.js";

const COLUMNS = [
  { title: "Device", of: (device) => device.name, text: true },
  { title: "Model", of: (device) => device.model || device.kind, text: true },
  { title: "Host", of: (device) => device.host || "–", text: true },
  { title: "Share", of: (device) => device.share, show: (value) => number(value, 4) },
  { title: "Compute", of: (device) => device.compute, show: seconds },
  { title: "Input wait", of: (device) => device.input, show: seconds },
  { title: "Sync wait", of: (device) => device.sync, show: seconds },
  { title: "Other", of: (device) => device.other, show: seconds },
  { title: "A sample (median)", of: (device) => device.seconds_per_sample, show: seconds },
  {
    title: "Against the fastest",
    of: (device) => device.against_best,
    score: true,
    help: "1: as fast as the fastest device. Low on an old device, which is no fault.",
  },
  {
    title: "Against its own best",
    of: (device) => device.against_own_best,
    score: true,
    help: "1: as fast as ever. Low on a device that is failing, throttled or shared.",
  },
];

export class Devices {
  constructor({ choose }) {
    this.choose = choose;
    this.sorted = { column: 0, down: false, natural: true };
    const parts = card("Devices");
    this.node = parts.whole;
    this.body = parts.body;
    this.note = element("span", { class: "note" });
    parts.tools.append(
      this.note,
      element("button", { type: "button", text: "Choose automatically", onclick: () => choose(null) }),
    );
  }

  show(devices, scores, chosen) {
    this.devices = devices.map((device, place) => ({
      ...device,
      place,
      against_best: scores?.against_best[place],
      against_own_best: scores?.against_own_best[place],
    }));
    this.chosen = new Set(chosen);
    this.note.textContent = `${this.chosen.size} of ${devices.length} chosen for the lanes and shares; means of these steps, stalls included`;
    this.draw();
  }

  draw() {
    const { column, down, natural } = this.sorted;
    const ordered = [...this.devices];
    if (!natural) {
      const { of, text } = COLUMNS[column];
      ordered.sort((one, other) => {
        const [a, b] = [of(one), of(other)];
        if (text) return a.localeCompare(b, "en", { numeric: true });
        return (a ?? -Infinity) - (b ?? -Infinity);
      });
      if (down) ordered.reverse();
    }
    const scroll = this.body.querySelector(".scroll")?.scrollTop ?? 0;
    const help = element("p", {
      class: "note",
      text:
        "Scores: 1 is as fast as the fastest device, or as the device itself has ever been. " +
        "An old device is low in the first, one that is failing, throttled or shared in the second.",
    });
    const table = element(
      "div",
      { class: "scroll", tabIndex: 0, role: "group", "aria-label": "Table of devices" },
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, element("th", {}), ...this.heads())),
        element("tbody", {}, ...ordered.map((device) => this.row(device))),
      ),
    );
    this.body.replaceChildren(table, help);
    table.scrollTop = scroll;
  }

  heads() {
    return COLUMNS.map((each, place) => {
      const here = !this.sorted.natural && this.sorted.column === place;
      const order = this.sorted.down ? "descending" : "ascending";
      const arrow = this.sorted.down ? " ▾" : " ▴";
      return element(
        "th",
        { "aria-sort": here ? order : "none", class: each.text ? "" : "number" },
        element("button", {
          type: "button",
          title: each.help ?? "",
          text: `${each.title}${here ? arrow : ""}`,
          onclick: () => this.sort(place),
        }),
      );
    });
  }

  sort(column) {
    const same = !this.sorted.natural && this.sorted.column === column;
    this.sorted = { column, natural: false, down: same ? !this.sorted.down : !COLUMNS[column].text };
    this.draw();
    this.body.querySelectorAll("th button")[column].focus();
  }

  row(device) {
    const box = element("input", {
      type: "checkbox",
      checked: this.chosen.has(device.place),
      "aria-label": `Show ${device.name}`,
      onchange: () => {
        if (box.checked) this.chosen.add(device.place);
        else this.chosen.delete(device.place);
        this.choose([...this.chosen].sort((one, other) => one - other));
      },
    });
    return element(
      "tr",
      {},
      element("td", {}, box),
      ...COLUMNS.map((each) => {
        const value = each.of(device);
        if (each.score) return element("td", { class: "number" }, score(value));
        const text = each.text ? value : each.show(value ?? NaN);
        return element("td", { class: each.text ? "" : "number", text, title: each.text ? text : "" });
      }),
    );
  }
}

function score(value) {
  if (!Number.isFinite(value ?? NaN)) {
    return element("span", { class: "note", text: "–", title: "Too few steps, or no samples." });
  }
  return element(
    "span",
    { class: "score" },
    element("span", { class: "track" }, element("i", { style: { width: `${100 * value}%` } })),
    value.toFixed(2),
  );
}

export class Changes {
  constructor() {
    const parts = card("Changes");
    this.node = parts.whole;
    this.body = parts.body;
  }

  show(changes) {
    if (!changes.length) {
      this.body.replaceChildren(empty("Nothing was changed in these steps."));
      return;
    }
    this.body.replaceChildren(
      element(
        "ol",
        { class: "changes scroll", tabIndex: 0, "aria-label": "Changes, the newest first" },
        ...[...changes].reverse().map((change) =>
          element(
            "li",
            {},
            element("span", { class: "step", text: `step ${count(change.step)}` }),
            ...(change.text.startsWith(change.kind)
              ? []
              : [element("span", { class: "kind", text: change.kind })]),
            element("span", { text: change.text }),
          ),
        ),
      ),
    );
  }
}

export class Exchanges {
  constructor() {
    const parts = card("Async workers");
    this.node = parts.whole;
    this.body = parts.body;
    this.body.classList.add("wide");
    this.body.tabIndex = 0;
  }

  show(exchanges) {
    this.node.hidden = !exchanges.length;
    const latest = new Map();
    for (const each of exchanges) {
      latest.set(each.worker, each);
    }
    this.body.replaceChildren(
      element(
        "table",
        {},
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ...["Worker", "Last heard at step", "Samples a second", "Staleness", "An exchange takes"].map((text) =>
              element("th", { text }),
            ),
          ),
        ),
        element(
          "tbody",
          {},
          ...[...latest.values()].map((each) =>
            element(
              "tr",
              {},
              ...[
                `async worker ${each.worker}`,
                count(each.step),
                number(each.samples_per_second ?? NaN),
                number(each.staleness ?? NaN),
                seconds(each.exchange_seconds ?? NaN),
              ].map((text) => element("td", { text })),
            ),
          ),
        ),
      ),
    );
  }
}
