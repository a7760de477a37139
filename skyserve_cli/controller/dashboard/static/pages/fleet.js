// All services: state, replicas, price against on demand, load, and the last failure.

import { get } from "../api.js";
import { cards, el, state, table } from "../dom.js";
import { number, percent, seconds, usd } from "../format.js";
import { section } from "../sections.js";

export function fleet(main) {
  main.append(el("h1", {}, "Services"));
  const sums = section(main), rows = section(main);
  return {
    async refresh() {
      const { services } = await get("/v1/fleet");
      sums(undefined, () => cards(totals(services)));
      rows(undefined, () => (services.length ? list(services) : el("p", {}, "No service is up. Begin with: serve up service.yaml")));
    },
  };
}

function totals(services) {
  const sum = (read) => services.reduce((total, one) => total + read(one), 0);
  const now = sum((one) => one.cost.usd_per_hour), there = sum((one) => one.cost.usd_per_hour_on_demand);
  return [
    ["services", services.length],
    ["ready of wanted replicas", `${sum((one) => one.ready)} of ${sum((one) => one.wanted)}`],
    ["now, per hour", usd(now)],
    ["of the same on demand", there ? percent(now / there, 0) : "–"],
  ];
}

function list(services) {
  const of = (one, read) => (one.traffic ? read(one.traffic) : null);
  return table("Services", [
    ["service", (one) => el("a", { href: `/s/${one.name}` }, one.name)],
    ["state", (one) => state(one.status)],
    ["ready", (one) => `${one.ready} of ${one.wanted}`, "number"],
    ["per hour", (one) => usd(one.cost.usd_per_hour), "number"],
    ["so far", (one) => usd(one.cost.usd_total), "number"],
    ["on demand", (one) => usd(one.cost.usd_on_demand_equivalent), "number"],
    ["requests/s", (one) => number(one.load.requests_per_s, 1), "number"],
    ["TTFT p50, p90", (one) => `${seconds(of(one, (t) => t.ttft_p50_s))}, ${seconds(of(one, (t) => t.ttft_p90_s))}`, "number"],
    ["hit rate", (one) => percent(of(one, (t) => t.hit_rate), 0), "number"],
    ["notes", (one) => (one.last_failure ? `${one.last_failure.reason}: ${one.last_failure.message}` : one.notes), "text"],
  ], services);
}
