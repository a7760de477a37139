// The router: one page at a time, drawn again after each change. Links are ordinary links; the browser's history works.

import { NoSession, enter, follow } from "./api.js";
import { el } from "./dom.js";
import { doctor } from "./pages/doctor.js";
import { events } from "./pages/events.js";
import { explain } from "./pages/explain.js";
import { fleet } from "./pages/fleet.js";
import { replica } from "./pages/replica.js";
import { service } from "./pages/service.js";
import { zones } from "./pages/zones.js";

const ROUTES = [
  [/^\/$/, fleet],
  [/^\/s\/([\w-]+)$/, service],
  [/^\/s\/([\w-]+)\/r\/(\d+)$/, replica],
  [/^\/s\/([\w-]+)\/explain$/, explain],
  [/^\/zones$/, zones],
  [/^\/events$/, events],
  [/^\/doctor$/, doctor],
];
const main = document.getElementById("main");
const link = document.getElementById("link");
let page = null;
let busy = false, again = false, hurry = null;
const LEAST_PAUSE_MS = 1000;
const AWAY = "the controller does not respond; trying again";

function open() {
  if (page && page.close) page.close();
  const found = ROUTES.map(([pattern, make]) => [location.pathname.match(pattern), make]).find(([match]) => match);
  main.replaceChildren();
  page = found ? found[1](main, ...found[0].slice(1)) : null;
  if (!page) main.append(el("h1", {}, "There is no such page"));
  if (hurry) hurry(); // another page does not wait
  document.title = `${main.querySelector("h1")?.textContent || "Services"} - SkyServe`;
  refresh();
}

// One refresh at a time; changes that come meanwhile cause one more, a second later: many changes at once are common.
async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  const shown = page;
  try {
    if (shown) await shown.refresh();
  } catch (error) {
    if (error instanceof NoSession) leave(error);
    else if (shown === page) say(error.message, true);
  } finally {
    if (again && shown === page) await new Promise((later) => { hurry = later; setTimeout(later, LEAST_PAUSE_MS); });
    busy = false;
    if (again || shown !== page) { again = false; refresh(); }
  }
}

function say(text, bad = false) {
  link.textContent = text;
  link.className = bad ? "bad" : "";
}

function leave(error) {
  if (page && page.close) page.close();
  page = null;
  main.replaceChildren(el("h1", {}, "No session"), el("p", {}, error.message));
  say("");
}

document.addEventListener("click", (event) => {
  const anchor = event.target.closest("a[href^='/']");
  if (!anchor || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  history.pushState(null, "", anchor.getAttribute("href"));
  open();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
addEventListener("popstate", open);

try {
  await enter(() => say(AWAY, true));
  say("");
  open();
  follow(refresh, (linked) => { say(linked ? "live" : AWAY, !linked); if (linked) refresh(); });
  setInterval(refresh, 10000); // loads and costs change without a change of the state
} catch (error) {
  leave(error);
}
