// What the page shows: TensorBoard's routes are asked for it, or it is inside the page, where
// `keras-het report` has put it.

export const PHASES = ["compute", "input", "sync", "other"];
const SERIES = ["values", "share", ...PHASES]; // of all rows: little-endian float32 in base64

export const inside = document.querySelector("#log");
const ask = inside ? find : request;

export const api = {
  runs: async () => (await ask("runs")).runs,
  overview: (run, range) => ask("overview", { run, ...range }),
  diagnosis: (run, range) => ask("diagnosis", { run, ...range }),
  pipeline: (run, range) => ask("pipeline", { run, ...range }),
  heatMap: (run, range, quantity, how) => ask("heat_map", { run, ...range, quantity, how }),
  lanes: (run, range, devices) => ask("lanes", { run, ...range, devices }),
};

async function request(route, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined) query.set(name, value);
  }
  const text = query.toString();
  const answer = await fetch(text ? `./${route}?${text}` : `./${route}`);
  if (!answer.ok) {
    const reason = (await answer.text()).slice(0, 300);
    throw new Error(`${answer.status}: ${reason || answer.statusText}`);
  }
  return unpacked(await answer.json());
}

let log = null;

// The page has the answers about all steps, of each quantity and of all devices.
async function find(route, { first = null, last = null, quantity, how, devices } = {}) {
  log ??= read();
  const answer = (await log)[route];
  return part(unpacked(quantity ? answer[quantity][how] : answer), first, last, devices);
}

function read() {
  const packed = new Blob([bytes(inside.textContent)]);
  return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// What an answer about all steps says of some of them; of its rows, those that were asked for.
function part(answer, first, last, devices) {
  const found = { ...answer };
  if (answer.changes && first !== null) {
    found.changes = answer.changes.filter(({ step }) => step >= first && step < last);
  }
  if (!answer.edges) return found;
  const columns = answer.edges.length - 1;
  let [begin, end] = [0, columns];
  if (first !== null) {
    while (begin < columns - 1 && answer.edges[begin + 1] <= first) begin += 1;
    while (end > begin + 1 && answer.edges[end - 1] >= last) end -= 1;
  }
  found.edges = answer.edges.slice(begin, end + 1);
  found.sampled = answer.sampled?.slice(begin, end);
  found.devices = devices;
  const rows = devices ?? Array.from({ length: answer.rows }, (_, row) => row);
  for (const name of SERIES.filter((each) => answer[each])) {
    const width = end - begin;
    found[name] = new Float32Array(rows.length * width);
    rows.forEach((row, place) => {
      const start = row * columns;
      found[name].set(answer[name].subarray(start + begin, start + end), place * width);
    });
  }
  if (first !== null && found.values) {
    const known = found.values.filter(Number.isFinite).sort();
    [found.low, found.high] = [0.01, 0.99].map(
      (fraction) => known[Math.round(fraction * (known.length - 1))] ?? null,
    );
  }
  return found;
}

function unpacked(answer) {
  const found = { ...answer };
  for (const name of SERIES) {
    if (typeof answer[name] === "string") found[name] = floats(answer[name]);
  }
  return found;
}

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function floats(text) {
  const view = new DataView(bytes(text).buffer);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, place) =>
    view.getFloat32(4 * place, true),
  );
}
