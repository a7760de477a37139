// Replicas over time as SVG: a lane for each zone, a strip for each replica coloured by its state, marks for preemptions, and
// above them how many were wanted and how many were ready. One path for each state of a lane, so a thousand replicas are a few
// dozen elements.

import { el, svg } from "./dom.js";

const LEFT = 150, STRIP = 5, HEAD = 90, FOOT = 22;
const STATES = ["REQUESTED", "PROVISIONING", "STARTING", "READY", "NOT_READY", "DRAINING", "TERMINATING"];
const MOST_STRIPS = 40; // of one lane; replicas that do not overlap in time share a strip

// In pixels, at which texts are as large as they are meant.
const width = () => Math.max(380, Math.min(1100, window.innerWidth));

export function timeline(history, since, until) {
  const wide = width();
  const x = (at) => LEFT + ((wide - LEFT - 8) * (Math.min(until, Math.max(since, at)) - since)) / Math.max(1, until - since);
  const spans = spansOf(history, since, until);
  const lanes = lanesOf(history.replicas, since, until);
  const height = HEAD + lanes.reduce((sum, lane) => sum + lane.height, 0) + FOOT;
  const marks = history.replicas.filter((one) => one.end_reason === "PREEMPTED" && one.ended_at >= since).length;
  const summary = `${history.replicas.length} replicas in ${lanes.length} zones, ${marks} preemptions`;
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `Replicas over time: ${summary}` });
  counts(picture, history, spans, since, until, x);
  let top = HEAD;
  for (const lane of lanes) {
    drawLane(picture, lane, spans, top, x, since);
    top += lane.height;
  }
  axis(picture, since, until, x, height);
  return el("figure", { class: "wide", tabindex: "0", "aria-label": "Timeline" }, picture, legend(summary));
}

// Returns id -> [[state, from, to], ...].
export function spansOf(history, since, until) {
  const changes = new Map();
  for (const change of history.changes) {
    if (change.replica_id === null) continue;
    if (!changes.has(change.replica_id)) changes.set(change.replica_id, []);
    changes.get(change.replica_id).push(change);
  }
  const found = new Map();
  for (const replica of history.replicas) {
    const end = replica.ended_at || until;
    const own = changes.get(replica.id) || [];
    const spans = [];
    let state = own.length && own[0].at > replica.created_at ? "REQUESTED" : null;
    let from = replica.created_at;
    for (const change of own) {
      if (state !== null && change.at > from) spans.push([state, from, change.at]);
      state = change.state;
      from = change.at;
    }
    if (state === null) state = replica.state;
    if (end > from && state !== "GONE") spans.push([state, from, end]);
    found.set(replica.id, spans.filter(([, , to]) => to >= since));
  }
  return found;
}

function lanesOf(replicas, since, until) {
  const zones = new Map();
  for (const replica of replicas) {
    if ((replica.ended_at || until) < since) continue;
    const name = `${replica.cloud}/${replica.zone}`;
    if (!zones.has(name)) zones.set(name, []);
    zones.get(name).push(replica);
  }
  return [...zones.entries()].sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, members]) => {
    const free = []; // when each strip is free again
    const strips = members.map((replica) => {
      let strip = free.findIndex((at) => at <= replica.created_at);
      if (strip < 0) strip = free.length < MOST_STRIPS ? free.length : free.indexOf(Math.min(...free));
      free[strip] = replica.ended_at || until;
      return strip;
    });
    return { name, members, strips, height: Math.max(22, (STRIP + 1) * free.length + 8) };
  });
}

function drawLane(picture, lane, spans, top, x, since) {
  picture.append(svg("line", { class: "lane", x1: 0, x2: "100%", y1: top, y2: top }));
  picture.append(svg("text", { x: 4, y: top + 14 }, lane.name.length > 24 ? `${lane.name.slice(0, 23)}…` : lane.name));
  const paths = Object.fromEntries(STATES.map((name) => [name, []]));
  const lost = [], dear = [];
  lane.members.forEach((replica, index) => {
    const y = top + 5 + lane.strips[index] * (STRIP + 1);
    for (const [state, from, to] of spans.get(replica.id)) {
      if (paths[state]) paths[state].push(box(x(from), x(to), y));
    }
    if (replica.capacity_type === "on_demand" && replica.launched_at) dear.push(`M${x(replica.launched_at).toFixed(1)} ${y}V${y + STRIP}`);
    if (replica.end_reason === "PREEMPTED" && replica.ended_at >= since) lost.push(`M${x(replica.ended_at).toFixed(1)} ${y - 2}v${STRIP + 4}`);
  });
  for (const [state, path] of Object.entries(paths)) {
    if (path.length) picture.append(svg("path", { class: `f-${state}`, d: path.join("") }));
  }
  if (dear.length) picture.append(svg("path", { class: "on_demand", d: dear.join("") }));
  if (lost.length) picture.append(svg("path", { class: "preempted", "data-preemptions": lost.length, d: lost.join("") }));
}

function box(from, to, y) {
  const width = Math.max(1, to - from);
  return `M${from.toFixed(1)} ${y}h${width.toFixed(1)}v${STRIP}h${(-width).toFixed(1)}z`;
}

function counts(picture, history, spans, since, until, x) {
  const turns = [];
  for (const own of spans.values()) {
    for (const [state, from, to] of own) if (state === "READY") turns.push([from, 1], ...(to < until ? [[to, -1]] : []));
  }
  turns.sort((one, other) => one[0] - other[0]);
  const ready = steps(turns.map(([at, by]) => ({ at, by })), 0);
  const wanted = history.changes.filter((c) => c.replica_id === null).map((c) => ({ at: c.at, to: Number(c.state) || 0 }));
  const most = Math.max(1, ...ready.map((p) => p.to), ...wanted.map((p) => p.to));
  const y = (count) => HEAD - 12 - ((HEAD - 26) * count) / most;
  picture.append(svg("text", { x: 4, y: 14 }, "ready and target"));
  picture.append(svg("text", { x: LEFT - 24, y: y(most) + 4 }, most), svg("text", { x: LEFT - 24, y: y(0) + 4 }, "0"));
  picture.append(svg("path", { class: "ready", d: stairs(ready, x, y, since, until) }));
  picture.append(svg("path", { class: "target", d: stairs(wanted, x, y, since, until) }));
}

function steps(turns, start) {
  let value = start;
  return turns.map(({ at, by }) => ({ at, to: (value += by) }));
}

function stairs(points, x, y, since, until) {
  const before = points.filter((p) => p.at <= since);
  let path = `M${x(since).toFixed(1)} ${y(before.length ? before[before.length - 1].to : 0).toFixed(1)}`;
  for (const point of points) {
    if (point.at > since) path += `H${x(point.at).toFixed(1)}V${y(point.to).toFixed(1)}`;
  }
  return `${path}H${x(until).toFixed(1)}`;
}

function axis(picture, since, until, x, height) {
  const steps = [60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];
  const most = Math.min(8, Math.max(2, (x(until) - x(since)) / 90));
  const step = steps.find((each) => (until - since) / each <= most) || 2592000;
  for (let at = Math.ceil(since / step) * step; at < until; at += step) {
    const time = new Date(1000 * at);
    const text = step >= 86400 ? time.toLocaleDateString() : time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    picture.append(svg("line", { class: "lane", x1: x(at), x2: x(at), y1: HEAD - 8, y2: height - FOOT }));
    picture.append(svg("text", { x: x(at) - 14, y: height - 6 }, text));
  }
}

function legend(summary) {
  const words = [["READY", "ready"], ["STARTING", "starting"], ["DRAINING", "draining"], ["NOT_READY", "not ready"], ["GONE", "terminating"]];
  return el("figcaption", {}, el("p", { class: "muted" }, summary, "; a red mark is a preemption, a dark edge an on-demand replica, the dashed line the target"),
    el("ul", { class: "legend" }, words.map(([state, text]) => el("li", {}, el("span", { class: `state s-${state}` }, text)))));
}
