// One service: figures of `serve report`, timeline, spending, requests over time, usage of API keys, replicas, zones and events.

import { act, get, session } from "../api.js";
import { chart } from "../charts.js";
import { chat } from "../chat.js";
import { cards, el, state, table } from "../dom.js";
import { age, clock, number, percent, seconds, usd } from "../format.js";
import { regions, slo } from "../regions.js";
import { section } from "../sections.js";
import { timeline } from "../timeline.js";

const USAGE_ROWS = 20;
const WINDOWS = [["last 15 minutes", 900], ["last 2 hours", 7200], ["last 24 hours", 86400], ["last 7 days", 604800], ["last 90 days", 7776000]];

export function service(main, name) {
  let window_s = 7200;
  const path = `/v1/services/${name}`;
  const chosen = el("select", { "aria-label": "Time shown", onchange: (event) => { window_s = Number(event.target.value); refresh(); } },
    WINDOWS.map(([text, value]) => el("option", { value, selected: value === window_s }, text)));
  main.append(el("h1", {}, name), el("p", {}, chosen, " ", el("a", { href: `/s/${name}/explain` }, "Why requests went where they went")));
  const top = section(main), line = section(main, "Replicas over time"), spent = section(main, "Spending"),
    promise = section(main), load = section(main, "Requests"), used = section(main), places = section(main), list = section(main, "Replicas"), happened = section(main, "Last events");
  if (session.chat) main.append(el("section", {}, el("h2", {}, "Try it"), chat(name))); // is drawn once: what was said stays

  async function refresh() {
    const since = Date.now() / 1000 - window_s;
    const one = await get(path);
    const [history, account, series, { events }, usage] = await Promise.all([
      get(`${path}/history?since=${since}`), get(`${path}/report?since=${since}`), get(`${path}/series?since=${since}`),
      get(`/v1/events?service=${name}&newest=1&limit=30`), get(`${path}/usage?top=${USAGE_ROWS}`),
    ]);
    top(undefined, () => head(one, account));
    line(undefined, () => timeline(history, Math.max(since, history.since), history.now));
    spent(undefined, () => spending(account));
    promise(undefined, () => titled("Service level", slo(one)));
    load(undefined, () => requests(series));
    used(undefined, () => titled("Usage of API keys", usageOf(usage)));
    places(undefined, () => titled("Load balancers", regions(one)));
    list(undefined, () => replicas(name, one, series, history.now));
    happened(undefined, () => story(events));
  }
  return { refresh };
}

function titled(title, parts) {
  return parts ? [el("h2", {}, title), ...parts] : [];
}

function head(one, { figures, why }) {
  const target = figures && figures.availability_target ? ` of ${percent(figures.availability_target, 2)} wanted` : "";
  const promise = one.availability;
  return [
    cards([
      ["state", state(one.status)],
      ["ready of wanted", `${one.ready} of ${one.wanted}`],
      ["version", one.serving_version === one.version ? one.version : `${one.serving_version ?? "–"}, updating to ${one.version}`],
      ["per hour", usd(one.cost.usd_per_hour)],
      [`availability${target}`, figures ? el("span", { "data-figure": "availability" }, percent(figures.availability, 2)) : "–"],
      ["spent", figures ? el("span", { "data-figure": "usd" }, usd(figures.usd, 2)) : "–"],
      ["all on demand", figures ? el("span", { "data-figure": "usd_on_demand" }, usd(figures.usd_on_demand, 2)) : "–"],
      ["preemptions", figures ? figures.preemptions : "–"],
      ["failed launches", figures ? figures.failed_launches : "–"],
    ]),
    why ? el("p", { class: "muted" }, why) : null,
    el("p", {}, "Endpoint: ", el("code", {}, one.endpoint || "–")),
    promise ? el("p", {}, `RiskHedge: ${percent(promise.realised_month, 3)} within 30 days, ${percent(promise.predicted, 3)} predicted, target ${percent(promise.target, 3)}`) : null,
    one.notes ? el("p", { id: "notes" }, one.notes) : null,
    one.last_failure ? el("p", { class: "bad" }, `Replica ${one.last_failure.replica_id}: ${one.last_failure.reason}: ${one.last_failure.message}`) : null,
    session.actions ? el("p", {}, el("button", { class: "danger", onclick: () => down(one.name) }, "Take the service down")) : null,
  ];
}

function spending({ curves }) {
  if (!curves) return el("p", { class: "muted" }, "Nothing was spent in this time yet.");
  return chart("Spent, against the target on demand", curves.at, [["spent", curves.usd, usd], ["all on demand", curves.usd_on_demand, usd]]);
}

function requests(series) {
  const { at, span_s } = series;
  const rate = (values) => values.map((value) => value / span_s);
  const per = (value) => number(value, 2);
  return el("div", { class: "charts" },
    chart("Requests and errors per second", at, [["requests", rate(series.requests), per], ["errors", rate(series.errors), per]]),
    chart("Time to first token", at, [["p50", series.ttft_p50_s, seconds], ["p90", series.ttft_p90_s, seconds]]),
    chart("Queue and requests in flight", at, [["in flight", series.in_flight, per], ["queued", series.queued, per]]),
    chart("Cache hit rate", at, [["hit rate", series.hit_rate, (value) => percent(value, 0)]]),
    chart("Tokens per second", at, [["generated", rate(series.tokens_out), per], ["prompts", rate(series.tokens_in), per]]));
}

// The largest rows of the last 30 days, whichever time is shown; nothing while there are none.
function usageOf({ rows, total, since }) {
  if (!rows.length) return null;
  const money = (value) => usd(value, value < 1 ? 4 : 2);
  const cells = [
    ["key", (row) => row.key || "–"], ["model", (row) => row.model || "–"],
    ...["requests", "tokens_in", "tokens_out"].map((column) => [column.replace("_", " "), (row) => row[column].toLocaleString("en"), "number"]),
    ...("usd" in total ? [["cost", (row) => money(row.usd), "number"]] : []), // where the service has prices of tokens
  ];
  const cost = "usd" in total ? `, ${money(total.usd)} at the prices of today` : "";
  const sums = `${total.requests.toLocaleString("en")} requests, ${(total.tokens_in + total.tokens_out).toLocaleString("en")} tokens${cost} since ${since} (UTC)`;
  return [table("Usage of API keys", cells, rows), el("p", { class: "muted" }, rows.length < USAGE_ROWS ? sums : `The ${USAGE_ROWS} with the most tokens; in all ${sums}`)];
}

function replicas(name, one, series, now) {
  const of = (replica, read) => (series.replicas[replica.id] ? read(series.replicas[replica.id]) : null);
  return table("Replicas", [
    ["id", (r) => el("a", { href: `/s/${name}/r/${r.id}` }, r.id)],
    ["state", (r) => state(r.state)],
    ["version", (r) => r.version, "number"],
    ["zone", (r) => `${r.cloud}/${r.zone}`],
    ["machine", (r) => `${r.instance_type}${r.capacity_type === "spot" ? ", spot" : ", on demand"}`],
    ["per hour", (r) => usd(r.price_usd_hour, 3), "number"],
    ["for", (r) => age(r.since, now), "number"],
    ["requests", (r) => number(of(r, (s) => s.requests)), "number"],
    ["TTFT p50, p90", (r) => `${seconds(of(r, (s) => s.ttft_p50_s))}, ${seconds(of(r, (s) => s.ttft_p90_s))}`, "number"],
    ["", (r) => (session.actions ? el("button", { class: "danger", "aria-label": `Terminate replica ${r.id}`, onclick: () => kill(name, r.id) }, "Terminate") : "")],
  ], one.replicas);
}

function story(events) {
  return table("Last events", [
    ["when", (e) => clock(e.at)], ["replica", (e) => e.replica_id ?? ""], ["what", (e) => e.kind], ["message", (e) => e.message, "text"],
  ], [...events].reverse());
}

async function kill(name, id) {
  if (confirm(`Terminate replica ${id} of ${name}? Another one takes its place.`)) await act(`/v1/services/${name}/replicas/${id}/down`, {});
}

async function down(name) {
  if (confirm(`Take ${name} down, and terminate all its replicas?`)) await act(`/v1/services/${name}/down`, { purge: false });
}
