// Whether the controller itself is well: its state, its lease, its clouds, and the notifications that wait.

import { get } from "../api.js";
import { cards, el, table } from "../dom.js";
import { age, clock } from "../format.js";
import { section } from "../sections.js";

export function doctor(main) {
  main.append(el("h1", {}, "Controller"));
  const top = section(main), notified = section(main, "Notifications");
  return {
    async refresh() {
      const health = await get("/v1/health");
      top(undefined, () => head(health));
      notified(undefined, () => waiting(health.notifications));
    },
  };
}

function head({ version, pid, uptime_s, clouds, store, database, lease }) {
  return [
    cards([
      ["state can be written", store.ok ? "yes" : "no"],
      ["leads", lease.leads ? "yes" : "no"],
      ["running for", age(1, 1 + uptime_s)],
      ["version", version],
      ["process", pid],
      ["epoch of the lease", lease.epoch],
    ]),
    store.ok ? null : el("p", { class: "bad" }, `The state could last be read and written at ${clock(store.since)}: ${store.why}`),
    lease.leads ? null : el("p", {}, `The leader is ${lease.leader}.`),
    el("p", {}, "Database: ", el("code", {}, database)),
    el("p", {}, `Clouds: ${clouds.join(", ")}. `, el("code", {}, "serve check"), " tests whether they can be used."),
  ];
}

function waiting(destinations) {
  const rows = Object.entries(destinations);
  if (!rows.length) return el("p", { class: "muted" }, "config.yaml names no destination under notify.");
  return table("Notifications", [
    ["destination", ([name]) => name],
    ["waiting", ([, one]) => one.waiting ?? "unknown", "number"],
    ["last failure", ([, one]) => one.trouble || "none", "text"],
  ], rows);
}
