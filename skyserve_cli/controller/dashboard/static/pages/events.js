// The event log of all services, the newest first.

import { get } from "../api.js";
import { el, state, table } from "../dom.js";
import { clock } from "../format.js";
import { section } from "../sections.js";

export function events(main) {
  main.append(el("h1", {}, "Events"));
  const rows = section(main);
  return {
    async refresh() {
      const { events: found } = await get("/v1/events?newest=1&limit=300");
      rows(found.length ? found[found.length - 1].seq : 0, () => table("Events", [
        ["when", (e) => clock(e.at)], ["service", (e) => (e.service ? el("a", { href: `/s/${e.service}` }, e.service) : "")],
        ["replica", (e) => e.replica_id ?? ""], ["what", (e) => e.kind], ["state", (e) => (e.state && e.replica_id ? state(e.state) : e.state ?? "")],
        ["message", (e) => e.message, "text"],
      ], [...found].reverse()));
    },
  };
}
