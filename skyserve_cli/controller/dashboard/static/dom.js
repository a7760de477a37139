// Elements from values. Text is always a text node, so whatever a name or a message holds stays text.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  append(node, children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  append(node, children);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

function append(node, children) {
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Returns a table; a column is [title, function from a row to its cell, "number" | "text" | ""].
export function table(caption, columns, rows) {
  const head = columns.map(([title, , kind]) => el("th", { scope: "col", class: kind || null }, title));
  const body = rows.map((row) => el("tr", {}, columns.map(([, cell, kind]) => el("td", { class: kind || null }, cell(row)))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { "aria-label": caption }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

export function cards(pairs) {
  return el("ul", { class: "cards" }, pairs.map(([label, value]) => el("li", {}, el("b", {}, value), el("span", {}, label))));
}

export function state(name) {
  return el("span", { class: `state s-${/^[A-Za-z_]+$/.test(name) ? name : "other"}` }, name);
}
