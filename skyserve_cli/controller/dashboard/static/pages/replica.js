// One replica: what it is, what happened to it, its requests, and its log as it grows.

import { get, log } from "../api.js";
import { chart } from "../charts.js";
import { cards, el, state, table } from "../dom.js";
import { clock, number, seconds, usd } from "../format.js";
import { section } from "../sections.js";

const FOLLOW_MS = 1000;
const MOST_CHARACTERS = 500_000;

export function replica(main, name, id) {
  main.append(el("h1", {}, `Replica ${id} of ${name}`), el("p", {}, el("a", { href: `/s/${name}` }, `Back to ${name}`)));
  const top = section(main), happened = section(main, "What happened"), load = section(main, "Requests");
  const text = el("pre", { tabindex: "0", "aria-label": "Log", id: "log" });
  main.append(el("section", {}, el("h2", {}, "Log"), text));
  let offset = 0, timer = null, closed = false;

  async function follow() {
    try {
      const [more, next] = await log(name, id, offset);
      if (closed) return;
      const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
      if (more) text.append(document.createTextNode(more));
      while (text.textContent.length > MOST_CHARACTERS && text.childNodes.length > 1) text.firstChild.remove();
      if (atEnd) text.scrollTop = text.scrollHeight;
      offset = next;
    } catch (error) {
      if (!text.textContent) text.dataset.why = error.message;
    }
    if (!closed) timer = setTimeout(follow, FOLLOW_MS);
  }
  follow();
  return {
    async refresh() {
      const [history, series, { events }] = await Promise.all([
        get(`/v1/services/${name}/history`), get(`/v1/services/${name}/series?replica=${id}`),
        get(`/v1/events?service=${name}&newest=1&limit=2000`),
      ]);
      const one = history.replicas.find((each) => each.id === Number(id));
      top(undefined, () => (one ? facts(one) : el("p", {}, "Nothing of this replica is kept.")));
      happened(undefined, () => table("What happened", [
        ["when", (e) => clock(e.at)], ["what", (e) => e.kind], ["state", (e) => (e.state ? state(e.state) : "")], ["message", (e) => e.message, "text"],
      ], events.filter((each) => each.replica_id === Number(id))));
      load(undefined, () => el("div", { class: "charts" },
        chart("Requests", series.at, [["requests", series.requests, number], ["errors", series.errors, number]]),
        chart("Time to first byte", series.at, [["p50", series.ttft_p50_s, seconds], ["p90", series.ttft_p90_s, seconds]])));
    },
    close() { closed = true; clearTimeout(timer); },
  };
}

function facts(one) {
  return [
    cards([
      ["state", state(one.state)], ["zone", `${one.cloud}/${one.zone}`], ["machine", one.instance_type],
      ["capacity", one.capacity_type === "spot" ? "spot" : "on demand"], ["per hour", usd(one.price_usd_hour, 3)], ["version", one.version],
      ["launched", clock(one.launched_at)], ["ready", clock(one.ready_at)], ["ended", one.ended_at ? `${clock(one.ended_at)}, ${one.end_reason}` : "–"],
    ]),
    one.message ? el("p", { id: "message" }, one.message) : null,
  ];
}
