// Colours that people with any colour vision can tell apart.

// Okabe and Ito, "Color Universal Design", 2008.
export const PHASE_COLORS = {
  compute: "#0072b2",
  input: "#e69f00",
  sync: "#cc79a7",
  other: "#999999",
};
export const PHASE_TITLES = {
  compute: "compute",
  input: "input wait",
  sync: "sync wait",
  other: "other",
};

export const PASS_COLORS = {
  forward: "#0072b2",
  backward: "#009e73",
  recompute: "#e69f00",
  transfer: "#cc79a7",
  all_reduce: "#d55e00",
};
export const PASS_TITLES = {
  forward: "forward",
  backward: "backward",
  recompute: "recomputation",
  transfer: "transfer",
  all_reduce: "all-reduce",
  idle: "idle",
};

const LINES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999"];
const DASHES = [[], [10, 8], [3, 6]];
const STYLES = ["solid", "dashed", "dotted"];

// The look of a line. Neighbours often have the same share: what is dashed shows what is below.
export function lineLook(place) {
  return { stroke: LINES[place % LINES.length], dash: DASHES[place % DASHES.length] };
}

// The same dashes, as a style of a border.
export function lineStyle(place) {
  return STYLES[place % STYLES.length];
}

// Viridis: its lightness grows evenly, in grey too.
const STOPS = [
  [68, 1, 84],
  [71, 45, 123],
  [59, 82, 139],
  [44, 114, 142],
  [33, 145, 140],
  [40, 174, 128],
  [94, 201, 98],
  [173, 220, 48],
  [253, 231, 37],
];

// Colour of a place between 0 and 1.
export function heat(place) {
  const scaled = Math.min(Math.max(place, 0), 1) * (STOPS.length - 1);
  const before = Math.min(Math.floor(scaled), STOPS.length - 2);
  const rest = scaled - before;
  return STOPS[before].map((value, part) =>
    Math.round(value + rest * (STOPS[before + 1][part] - value)),
  );
}

export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
