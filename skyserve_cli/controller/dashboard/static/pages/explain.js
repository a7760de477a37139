// Why the last requests went where they went: each step, and the candidates of each choice with their terms.

import { get } from "../api.js";
import { el, table } from "../dom.js";
import { section } from "../sections.js";

export function explain(main, name) {
  main.append(el("h1", {}, `Last requests of ${name}`), el("p", {}, el("a", { href: `/s/${name}` }, `Back to ${name}`)));
  const rows = section(main);
  let key = "";
  return {
    async refresh() {
      const { requests } = await get(`/v1/services/${name}/explain?limit=50`);
      const last = requests.map((one) => `${one.request_id}/${one.steps.length}`).join();
      if (last === key && last) return; // what the reader has unfolded stays as it is
      key = last;
      rows(undefined, () => (requests.length ? requests.map(request) : el("p", {}, "No load balancer of this service remembers a request.")));
    },
  };
}

function request(one) {
  const chosen = one.steps.filter((step) => step.target).map((step) => step.target).pop();
  return el("details", {}, el("summary", {}, `${one.method} ${one.path} `, el("span", { class: "muted" }, `${one.request_id}, ${chosen ? `replica ${chosen}` : "no replica"}`)),
    table(`Steps of ${one.request_id}`, [
      ["after", (step) => `${(1000 * step.after_s).toFixed(1)} ms`, "number"], ["step", (step) => step.event], ["replica", (step) => step.target ?? ""],
      ["why", (step) => step.why, "text"], ["matched", (step) => (step.matched_bytes ? `${step.matched_bytes} B` : ""), "number"],
      ["candidates", (step) => candidates(step.candidates), "text"],
    ], one.steps));
}

// The best candidates of a choice, the cheapest first; costs and terms are seconds where their names say so.
function candidates(found) {
  if (!found.length) return "";
  return el("ul", { class: "candidates" }, [...found].sort((one, other) => one.cost - other.cost).map((one) => {
    const terms = Object.entries(one.terms || {}).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`);
    return el("li", {}, `replica ${one.target}: cost ${one.cost}${terms.length ? ` (${terms.join(", ")})` : ""}`);
  }));
}
