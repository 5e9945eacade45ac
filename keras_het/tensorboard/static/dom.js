// Elements, made without any HTML text: what a log says is shown as text, whatever it is.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (name === "text") made.textContent = value;
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A file beside this one, and an element in the head that loads it: done also if it fails.
export function file(name) {
  return new URL(name, import.meta.url).href;
}

export function loaded(tag, properties) {
  return new Promise((resolve) => {
    document.head.append(element(tag, { ...properties, onload: resolve, onerror: resolve }));
  });
}

export function options(select, entries, chosen) {
  select.replaceChildren(
    ...entries.map(([value, text]) =>
      element("option", { value, text, selected: value === chosen }),
    ),
  );
}

export function card(title, ...children) {
  const tools = element("div", { class: "tools" });
  const body = element("div", { class: "body" });
  const heading = element("h2", { text: title });
  const whole = element(
    "section",
    { class: "card", "aria-label": title },
    element("header", {}, heading, tools),
    body,
  );
  body.append(...children);
  return { whole, body, tools };
}

export function empty(text) {
  return element("p", { class: "empty", text });
}
