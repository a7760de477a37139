// The market as this controller saw it in the last 24 hours: what was tried, refused and preempted in each zone, and prices.

import { get } from "../api.js";
import { el, table } from "../dom.js";
import { clock, number, usd } from "../format.js";
import { section } from "../sections.js";

const DAY_S = 86400;
const REFUSALS = new Set(["CAPACITY", "QUOTA", "AUTH", "REFUSED", "CONFIG", "CLOUD_ERROR"]);

export function zones(main) {
  main.append(el("h1", {}, "Zones"), el("p", { class: "muted" }, "Launches of all services in the last 24 hours."));
  const rows = section(main);
  return {
    async refresh() {
      const { services } = await get("/v1/fleet");
      const since = Date.now() / 1000 - DAY_S;
      const histories = await Promise.all(services.slice(0, 50).map((one) => get(`/v1/services/${one.name}/history?since=${since}`)));
      const found = [...grouped(histories, since).values()].sort((one, other) => (one.key < other.key ? -1 : 1));
      rows(undefined, () => (found.length ? list(found) : el("p", {}, "Nothing was launched.")));
    },
  };
}

export function grouped(histories, since) {
  const found = new Map();
  for (const history of histories) {
    for (const one of history.replicas) {
      if ((one.ended_at ?? Infinity) < since) continue;
      const key = `${one.cloud}/${one.region}/${one.zone}/${one.capacity_type}`;
      const row = found.get(key) || { key, cloud: one.cloud, zone: one.zone, kind: one.capacity_type, tried: 0, refused: 0, preempted: 0, alive: 0, hours: 0, price: 0, last: 0 };
      const launched = one.launched_at !== null;
      row.tried += 1;
      row.refused += !launched && REFUSALS.has(one.end_reason);
      row.preempted += one.end_reason === "PREEMPTED";
      row.alive += one.ended_at === null;
      row.hours += launched ? ((one.ended_at ?? history.now) - Math.max(since, one.launched_at)) / 3600 : 0;
      if (one.end_reason === "PREEMPTED") row.last = Math.max(row.last, one.ended_at);
      row.price = one.price_usd_hour;
      found.set(key, row);
    }
  }
  return found;
}

function list(found) {
  return table("Zones", [
    ["zone", (row) => `${row.cloud}/${row.zone}`], ["capacity", (row) => (row.kind === "spot" ? "spot" : "on demand")],
    ["tried", (row) => row.tried, "number"], ["refused", (row) => row.refused, "number"], ["preempted", (row) => row.preempted, "number"],
    ["per replica and hour", (row) => (row.hours > 0 ? number(row.preempted / row.hours, 2) : "–"), "number"],
    ["now", (row) => row.alive, "number"], ["price per hour", (row) => usd(row.price, 3), "number"], ["last preemption", (row) => clock(row.last)],
  ], found);
}
