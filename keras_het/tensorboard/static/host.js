// What TensorBoard tells the tab: that data was reloaded, and whether it is dark.

// TensorBoard keeps the frames of plugins light; its own page says in a class of its body what the
// user has chosen.
export function followTheme(changed) {
  const prefers = window.matchMedia("(prefers-color-scheme: dark)");
  let outer = null;
  try {
    if (window.parent !== window) outer = window.parent.document.body;
  } catch {
    outer = null; // shown by a page of another origin
  }
  const apply = () => {
    const dark = outer ? outer.classList.contains("dark-mode") : prefers.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    changed();
  };
  if (outer) {
    new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
  }
  prefers.addEventListener("change", apply);
  apply();
}

// Opened alone, the page has no host: then nobody calls.
export function onReload(reloaded) {
  if (window.parent === window) return;
  const channel = new MessageChannel();
  channel.port1.onmessage = (event) => {
    let message;
    try {
      message = typeof event.data === "string" ? JSON.parse(event.data) : event.data;
    } catch {
      return;
    }
    if (!message || message.isReply) return;
    channel.port1.postMessage(
      JSON.stringify({ type: message.type, id: message.id, payload: null, error: null, isReply: true }),
    );
    if (message.type === "experimental.DataReloaded") reloaded();
  };
  window.parent.postMessage("experimental.bootstrap", "*", [channel.port2]);
}
