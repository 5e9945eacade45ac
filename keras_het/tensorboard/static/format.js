// Numbers as people read them.

const MISSING = "–";

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  return value.toLocaleString("en", {
    maximumFractionDigits: Math.min(Math.max(digits - 1 - size, 0), 12),
  });
}

function scaled(value, units, factor) {
  let place = 0;
  let rest = value;
  while (Math.abs(rest) >= factor && place < units.length - 1) {
    rest /= factor;
    place += 1;
  }
  return `${significant(rest)} ${units[place]}`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size >= 1 || size === 0) return `${significant(value)} s`;
  if (size >= 1e-3) return `${significant(value * 1e3)} ms`;
  return `${significant(value * 1e6)} µs`;
}

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

// As the text of a plan has them.
export function decimalBytes(value) {
  return Number.isFinite(value) ? scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000) : MISSING;
}

export function quantity(value, unit) {
  if (!Number.isFinite(value)) return MISSING;
  switch (unit) {
    case "s":
      return seconds(value);
    case "1":
      return `${significant(100 * value)} %`;
    case "By":
      return scaled(value, BYTES, 1024);
    case "By/s":
      return `${scaled(value, BYTES, 1024)}/s`;
    case "Hz":
      return scaled(value, ["Hz", "kHz", "MHz", "GHz"], 1000);
    case "Cel":
      return `${significant(value)} °C`;
    case "{cpu}":
      return `${significant(value)} CPUs`;
    default:
      return unit ? `${significant(value)} ${unit}` : significant(value);
  }
}

export function count(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : MISSING;
}

export function number(value, digits = 3) {
  return Number.isFinite(value) ? significant(value, digits) : MISSING;
}

export function steps(first, last) {
  const end = last - 1;
  return end > first ? `steps ${count(first)} to ${count(end)}` : `step ${count(first)}`;
}
