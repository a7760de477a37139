// Line charts by uPlot, in the colours of the page. A table with the last values follows each, for readers without the picture.

import uPlot from "./vendor/uPlot/uPlot.esm.js";
import { el } from "./dom.js";
import { different } from "./format.js";

const COLOURS = ["--accent", "--bad", "--ready", "--draining"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `series` are [label, values, function from a value to its text].
export function chart(title, at, series) {
  const place = el("div", { class: "chart" });
  const known = at.length > 0 && series.some(([, values]) => values.some((value) => value !== null));
  const last = series.map(([label, values, text]) => `${label} ${text(values.length ? values[values.length - 1] : null)}`).join(", ");
  const figure = el("figure", { "aria-label": title }, el("h3", {}, title), place, el("figcaption", { class: "muted" }, known ? `now: ${last}` : "nothing was counted in this time"));
  if (known) requestAnimationFrame(() => draw(place, at, series));
  return figure;
}

function draw(place, at, series) {
  if (!place.isConnected) return;
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--muted"), grid, ticks: grid };
  const [, , text] = series[0];
  const options = {
    width: Math.max(240, place.clientWidth - 12), height: 190, legend: { live: false },
    scales: { y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1] } },
    axes: [axis, { ...axis, size: 64, values: (_, ticks) => different(ticks, text) }],
    series: [{}, ...series.map(([label], index) => ({ label, stroke: colour(COLOURS[index]), width: 1.5, spanGaps: false, points: { show: at.length < 200, size: 4 } }))],
  };
  new uPlot(options, [at, ...series.map(([, values]) => values)], place);
}
