// Load balancers in regions with the times between them, and how a service keeps its SLO.

import { cards, el, state, svg, table } from "./dom.js";
import { age, number, percent } from "./format.js";

const SIZE = { width: 640, height: 300 };

// Returns nothing for a service without load balancers in regions.
export function regions({ load_balancers: agents }) {
  if (!agents.length) return null;
  return [
    agents.length > 1 ? map(agents) : null,
    table("Load balancers", [
      ["id", (a) => a.id],
      ["region", (a) => `${a.cloud}/${a.region}`],
      ["state", (a) => state(a.state)],
      ["newest table", (a) => (a.synced ? "yes" : "no")],
      ["replicas it can use", (a) => a.ready_targets, "number"],
      ["owns", (a) => (a.owned === null ? "all" : a.owned.join(", ") || "none")],
      ["forwarded to others", (a) => sum(a, "forwarded_out"), "number"],
      ["from others", (a) => sum(a, "forwarded_in"), "number"],
      ["notes", (a) => a.message, "text"],
    ], agents),
  ];
}

function sum(agent, key) {
  return agent.peers.reduce((total, peer) => total + peer[key], 0);
}

// Agents on a circle, and between two of them the time there and back, in milliseconds.
function map(agents) {
  const at = new Map(agents.map((agent, number) => {
    const angle = (2 * Math.PI * number) / agents.length - Math.PI / 2;
    return [String(agent.id), [SIZE.width / 2 + 220 * Math.cos(angle), SIZE.height / 2 + 105 * Math.sin(angle)]];
  }));
  const links = [], marks = [], said = [];
  for (const agent of agents) {
    for (const peer of agent.peers) {
      const to = at.get(String(peer.id)), from = at.get(String(agent.id));
      if (!to || String(peer.id) < String(agent.id)) continue;
      const text = peer.trouble ? "no link" : peer.rtt_ms === null ? "not measured" : `${peer.rtt_ms.toFixed(1)} ms`;
      links.push(svg("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], class: peer.trouble ? "cut" : "linked" }));
      marks.push(svg("text", { x: (from[0] + to[0]) / 2, y: (from[1] + to[1]) / 2 - 4, "text-anchor": "middle" }, text));
      said.push(`${agent.region} and ${peer.region}: ${text}`);
    }
    const [x, y] = at.get(String(agent.id));
    marks.push(svg("circle", { cx: x, cy: y, r: 9, class: agent.alive ? "alive" : "dead" }));
    marks.push(svg("text", { x, y: y + 24, "text-anchor": "middle" }, agent.region));
  }
  return el("figure", { class: "wide", tabindex: "0", "aria-label": "Times between regions" },
    svg("svg", { class: "regions", viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": said.join("; ") || "no links" }, links, marks));
}

// Returns nothing for a service without an SLO.
export function slo({ slo: kept, ready }) {
  if (!kept) return null;
  const per_min = (value) => number(value, 0);
  const limits = [["first token", kept.ttft_ms], ["each further token", kept.tpot_ms]].filter(([, ms]) => ms !== null);
  const capacity = kept.capacity_qps === null ? null : 60 * kept.capacity_qps * ready;
  return [
    el("p", {}, `${percent(kept.attainment_asked, 2)} of requests: ${limits.map(([what, ms]) => `${what} within ${ms} ms`).join(", ")}`),
    cards([
      ["in time, last 24 hours", percent(kept.attainment, 2)],
      ["error budget left", percent(kept.budget_left, 0)],
      ["headroom", number(kept.headroom, 2)],
      ["a start takes", kept.cold_start_s === null ? "–" : age(1, 1 + kept.cold_start_s)],
      ["forecast would want", number(kept.would_want)],
    ]),
    bars([
      ["last minute", kept.work_per_min ?? kept.requests_per_min], ["forecast when a new replica is ready", kept.forecast_per_min],
      ["most until one could be replaced", kept.forecast_most_per_min], ["capacity of ready replicas", capacity],
    ], (value) => `${per_min(value)}/min`),
  ];
}

function bars(rows, text) {
  const known = rows.filter(([, value]) => value !== null);
  if (!known.length) return el("p", { class: "muted" }, "No minute was decided by yet.");
  const most = Math.max(...known.map(([, value]) => value), 1e-9);
  return el("table", { "aria-label": "Demand and capacity" }, el("tbody", {}, known.map(([label, value]) => el("tr", {},
    el("th", { scope: "row" }, label), el("td", { class: "number" }, text(value)),
    el("td", {}, el("meter", { min: 0, max: most, value, "aria-label": `${label}: ${text(value)}` }))))));
}
