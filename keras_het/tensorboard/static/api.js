// Requests to the plugin's own routes.

async function get(route, parameters = {}) {
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
  return answer.json();
}

// Little-endian float32 in base64.
function floats(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let place = 0; place < raw.length; place += 1) bytes[place] = raw.charCodeAt(place);
  const view = new DataView(bytes.buffer);
  const values = new Float32Array(bytes.length / 4);
  for (let place = 0; place < values.length; place += 1) {
    values[place] = view.getFloat32(4 * place, true);
  }
  return values;
}

export async function runs() {
  return (await get("runs")).runs;
}

export function overview(run, range) {
  return get("overview", { run, ...range });
}

export function diagnosis(run, range) {
  return get("diagnosis", { run, ...range });
}

export async function heatMap(run, range, quantity, how) {
  const answer = await get("heat_map", { run, ...range, quantity, how });
  return { ...answer, values: floats(answer.values) };
}

export function pipeline(run, range) {
  return get("pipeline", { run, ...range });
}

export const PHASES = ["compute", "input", "sync", "other"];

export async function lanes(run, range, devices) {
  const answer = await get("lanes", { run, ...range, devices: devices.join(",") });
  for (const name of [...PHASES, "share"]) answer[name] = floats(answer[name]);
  return answer;
}
