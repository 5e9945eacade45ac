// The tab "Heterogeneous", and the page of `keras-het report`: wires the views to their data.

import { api, inside } from "./api.js";
import { Changes, Devices, Exchanges } from "./devices.js";
import { element, file, loaded, options } from "./dom.js";
import { count, steps } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { followTheme, onReload } from "./host.js";
import { Lanes } from "./lanes.js";
import { Pipeline } from "./pipeline.js";
import { Shares } from "./shares.js";
import { Verdict, WhatIf } from "./summary.js";

const POLL_MILLISECONDS = 30_000;
const MOST_USUAL = 12;
const MOST_CHOSEN = 24;

class Page {
  constructor() {
    this.run = null;
    this.written = null; // time of the last value that is shown
    this.range = { first: null, last: null };
    this.quantity = "compute"; // wall times are alike: all wait for the slowest
    this.how = "median";
    this.chosen = null; // null: the usual choice
    this.asked = 0;
    const zoom = (first, last) => this.zoom(first, last);
    const choose = (devices) => this.choose(devices);
    this.verdict = new Verdict();
    this.heatMap = new HeatMap({
      zoom,
      pick: (device) => this.toggle(device),
      choose: (quantity, how) => {
        Object.assign(this, { quantity, how });
        this.load(false);
      },
    });
    this.pipeline = new Pipeline();
    this.lanes = new Lanes({ zoom });
    this.shares = new Shares({ zoom });
    this.whatIf = new WhatIf();
    this.devices = new Devices({ choose });
    this.changes = new Changes();
    this.exchanges = new Exchanges();
    this.build();
  }

  build() {
    this.runs = element("select", {
      id: "run",
      "aria-label": "Run",
      onchange: () => {
        Object.assign(this, { chosen: null, range: { first: null, last: null } });
        this.open(this.runs.value);
      },
    });
    this.shown = element("span", { class: "range" });
    this.reset = element("button", {
      type: "button",
      text: "All steps",
      hidden: true,
      onclick: () => this.zoom(null, null),
    });
    this.state = element("span", { class: "note", role: "status" });
    this.problem = element("div", { class: "problem", role: "alert", hidden: true });
    this.bar = element(
      "header",
      { class: "top" },
      element("label", { htmlFor: "run", text: "Run" }),
      this.runs,
      this.shown,
      this.reset,
      element("span", { class: "grow" }),
      this.state,
      element("button", {
        type: "button",
        text: "Refresh",
        hidden: Boolean(inside),
        onclick: () => this.refresh(true),
      }),
    );
    this.views = element(
      "main",
      { hidden: true },
      this.verdict.node,
      this.pipeline.node,
      this.heatMap.node,
      this.lanes.node,
      this.shares.node,
      element("div", { class: "pair" }, this.whatIf.node, this.changes.node),
      this.devices.node,
      this.exchanges.node,
    );
    this.nothing = element(
      "div",
      { class: "nothing", hidden: true },
      element("h1", { text: "No training with telemetry here yet" }),
      element("p", { text: "Add the callback to fit, and start TensorBoard with its directory:" }),
      element("pre", {
        text:
          'model.fit(dataset, callbacks=[keras_het.callbacks.Telemetry("logs")])\n\n' +
          "tensorboard --logdir logs",
      }),
    );
    document.body.replaceChildren(this.bar, this.problem, this.nothing, this.views);
  }

  // Runs something that asks the server, and says what went wrong.
  async tell(work) {
    try {
      await work();
      this.problem.hidden = true;
    } catch (error) {
      this.problem.textContent = `The data could not be read. ${error.message}`;
      this.problem.hidden = false;
      this.state.textContent = "";
      console.info(error);
    }
  }

  refresh(always = false) {
    return this.tell(async () => {
      const runs = await api.runs();
      this.nothing.hidden = runs.length > 0;
      if (!runs.length) {
        this.views.hidden = true;
        options(this.runs, []);
        this.run = null;
        return;
      }
      const current = runs.find((run) => run.name === this.run) ?? runs[0];
      options(
        this.runs,
        runs.map((run) => [run.name, title(run.name)]),
        current.name,
      );
      if (always || current.name !== this.run || current.written !== this.written) {
        this.written = current.written;
        await this.open(current.name);
      }
    });
  }

  open(run) {
    this.run = run;
    if (inside) document.title = `keras_het: ${title(run)}`;
    return this.load(true);
  }

  zoom(first, last) {
    const whole = this.whole;
    if (whole && first !== null) {
      const begin = Math.max(first, whole.first);
      const end = Math.min(last, whole.last);
      if (begin <= whole.first && end >= whole.last) first = last = null;
      else [first, last] = [Math.min(begin, whole.last - 1), Math.max(end, begin + 1)];
    }
    this.range = { first, last };
    this.load(true);
  }

  choose(devices) {
    this.chosen = devices;
    if (devices && devices.length > MOST_CHOSEN) this.chosen = devices.slice(0, MOST_CHOSEN);
    this.load(false);
  }

  toggle(device) {
    const chosen = new Set(this.selection());
    if (!chosen.delete(device)) chosen.add(device);
    this.choose([...chosen].sort((one, other) => one - other));
  }

  // All devices if they are few, else those whose speed changes most, the slowest, some in the
  // middle and the fastest.
  selection() {
    if (this.chosen) return this.chosen;
    const { devices } = this.overview;
    const all = devices.map((_, place) => place);
    if (all.length <= MOST_USUAL) return all;
    const sorted = (value) => [...all].sort((one, other) => value(other) - value(one));
    const byTime = sorted((place) => devices[place].seconds_per_sample ?? devices[place].compute ?? 0);
    const bySpread = sorted((place) => devices[place].spread ?? 0);
    const part = MOST_USUAL / 4;
    const middle = Math.floor((byTime.length - part) / 2);
    const chosen = new Set([
      ...bySpread.slice(0, part),
      ...byTime.slice(0, part),
      ...byTime.slice(middle, middle + part),
      ...byTime.slice(-part),
    ]);
    return [...chosen].sort((one, other) => one - other);
  }

  // Asks for the plots, or for everything, and shows each answer as soon as it is there. What comes
  // after a newer question is dropped.
  load(everything) {
    return this.tell(async () => {
      this.asked += 1;
      const asked = this.asked;
      const isLate = () => asked !== this.asked;
      this.state.textContent = "Loading …";
      const { run, range } = this;
      const map = api.heatMap(run, range, this.quantity, this.how);
      map.catch(() => {}); // told below, unless it comes too late
      if (everything) {
        const overview = await api.overview(run, range);
        if (isLate()) return;
        this.showOverview(overview);
      }
      const hasSteps = this.overview.last > this.overview.first;
      for (const view of [this.heatMap, this.lanes, this.shares, this.whatIf]) {
        view.node.hidden = !hasSteps;
      }
      this.whatIf.node.hidden ||= this.overview.pipeline; // it is about whole replicas
      const parts = [this.loadDiagnosis(run, range, everything, isLate)];
      if (everything) parts.push(this.loadPipeline(run, range, isLate));
      if (hasSteps) {
        parts.push(map.then((answer) => isLate() || this.showHeatMap(answer)));
        parts.push(
          api
            .lanes(run, range, this.selection())
            .then((answer) => (isLate() ? undefined : this.showLanes(answer))),
        );
      }
      await Promise.all(parts);
      if (isLate()) return;
      this.state.textContent = inside
        ? `Written ${new Date(1000 * this.written).toLocaleString()}`
        : `Updated ${new Date().toLocaleTimeString()}`;
    });
  }

  async loadDiagnosis(run, range, everything, isLate) {
    if (!everything) return;
    const diagnosis = await api.diagnosis(run, range);
    if (isLate()) return;
    this.diagnosis = diagnosis;
    this.showDiagnosis();
  }

  async loadPipeline(run, range, isLate) {
    this.pipeline.node.hidden ||= !this.overview.pipeline;
    if (!this.overview.pipeline) return;
    const answer = await api.pipeline(run, range);
    if (!isLate()) this.pipeline.show(answer);
  }

  showOverview(overview) {
    this.overview = overview;
    this.diagnosis = null;
    this.whole = { first: overview.first_of_all, last: overview.last_of_all };
    this.views.hidden = false;
    const names = overview.quantities.map((each) => each.name);
    if (!names.includes(this.quantity)) this.quantity = "compute";
    this.heatMap.choices(overview.quantities, this.quantity);
    this.reset.hidden = this.range.first === null;
    const measured = overview.measured === null ? "" : `, ${count(overview.measured)} measured`;
    const thinned = `${measured}${overview.thinned ? ", later ones thinned" : ""}`;
    this.shown.textContent =
      overview.last > overview.first ? `${this.part()}${steps(overview.first, overview.last)}${thinned}` : "";
    this.changes.show(overview.changes);
    this.exchanges.show(overview.exchanges);
    this.showDiagnosis();
  }

  // Numbers inside the page are of all steps; only plots and changes can be of some.
  part() {
    const { first, last } = this.range;
    return inside && first !== null ? `plots: ${steps(first, last)}; all else: ` : "";
  }

  showDiagnosis() {
    const { overview, diagnosis } = this;
    this.verdict.show(overview, diagnosis);
    this.whatIf.show(overview, diagnosis);
    this.devices.show(overview.devices, diagnosis?.scores, this.selection());
  }

  showHeatMap(map) {
    const { devices, changes, quantities } = this.overview;
    const unit = quantities.find((each) => each.name === this.quantity)?.unit ?? "";
    this.heatMap.show(map, devices, changes, unit);
  }

  showLanes(lanes) {
    const { devices, changes } = this.overview;
    this.lanes.show(lanes, devices, changes);
    this.devices.show(devices, this.diagnosis?.scores, lanes.devices);
    return this.shares.show(lanes, devices);
  }

  redraw() {
    this.heatMap.plot.draw();
    this.lanes.plot.draw();
    this.shares.redraw();
  }
}

// Every log is in a folder of this name.
function title(run) {
  return run.replace(/\/telemetry$/, "");
}

export async function render() {
  if (!inside) await loaded("link", { rel: "stylesheet", href: file("style.css") });
  document.documentElement.lang = "en";
  const page = new Page();
  followTheme(() => page.redraw());
  if (inside) return page.refresh(true);
  onReload(() => page.refresh());
  setInterval(() => {
    if (!document.hidden && document.body.clientHeight) page.refresh();
  }, POLL_MILLISECONDS);
  return page.refresh(true);
}
