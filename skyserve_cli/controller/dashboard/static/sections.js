// A part of a page that is drawn again as a whole. The focus stays on the element with the same address or label.

import { el } from "./dom.js";

export function section(parent, title = null) {
  const place = el("div");
  parent.append(el("section", {}, title ? el("h2", {}, title) : null, place));
  let shown;
  return (key, make) => {
    if (key !== undefined && key === shown) return;
    shown = key;
    const active = place.contains(document.activeElement) ? document.activeElement : null;
    const same = active && ((node) => node.tagName === active.tagName && node.getAttribute("href") === active.getAttribute("href")
      && node.getAttribute("aria-label") === active.getAttribute("aria-label") && node.textContent === active.textContent);
    const made = make();
    place.replaceChildren(...(Array.isArray(made) ? made.flat(9).filter(Boolean) : [made]));
    if (same) [...place.querySelectorAll(active.tagName)].find(same)?.focus({ preventScroll: true });
  };
}
