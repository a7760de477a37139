// The public JSON API of the controller, with ETags, and the stream of changes.

const kept = new Map(); // address -> {etag, body}
export const session = { name: "", role: "", chat: false, actions: false, token: null };

export class NoSession extends Error {}
const MOST_MS = 20000; // a request that hangs would stop all further refreshes
const AGAIN_MS = 1000;

// Enters with the code in the address, once, and takes it out of the address and of the history of the browser. Calls `waiting` while the
// controller does not respond. Whether the code has been taken is what the session shows.
export async function enter(waiting) {
  const code = location.hash.slice(1);
  if (/^[\w-]{20,}$/.test(code)) {
    history.replaceState(null, "", location.pathname + location.search);
    const response = await fetch("/session", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }), signal: AbortSignal.timeout(MOST_MS),
    }).catch(() => null);
    if (response && !response.ok) throw new NoSession((await response.json()).error);
  }
  const response = await entered(waiting);
  if (!response.ok) throw new NoSession((await response.json()).error);
  Object.assign(session, await response.json());
}

async function entered(waiting) {
  for (;;) {
    try {
      return await fetch("/session", { signal: AbortSignal.timeout(MOST_MS) });
    } catch {
      waiting();
      await new Promise((later) => setTimeout(later, AGAIN_MS));
    }
  }
}

export async function get(address) {
  const before = kept.get(address);
  const response = await fetch(address, { headers: before ? { "If-None-Match": before.etag } : {}, cache: "no-store", signal: AbortSignal.timeout(MOST_MS) })
    .catch(() => { throw new Error("the controller does not respond; trying again"); }); // the browser's own words say less
  if (response.status === 304) return before.body;
  const body = await decoded(response);
  const etag = response.headers.get("ETag");
  if (etag) kept.set(address, { etag, body });
  return body;
}

export async function act(address, body) {
  const headers = { "Content-Type": "application/json", "X-Skyserve-Action": session.token || "" };
  return decoded(await fetch(address, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function decoded(response) {
  if (response.status === 401) throw new NoSession((await response.json()).error);
  if (!response.ok) {
    const text = await response.text();
    let why = `the controller returned ${response.status}`;
    try { why = JSON.parse(text).error || why; } catch { /* not from the controller */ }
    throw new Error(why);
  }
  return response.json();
}

// Returns text of a log and the offset of what follows.
export async function log(name, id, offset) {
  const response = await fetch(`/v1/logs/replica/${encodeURIComponent(name)}/${id}?offset=${offset}&max=262144`, { cache: "no-store" });
  if (response.status === 401) throw new NoSession("no session");
  if (!response.ok) throw new Error((await response.json()).error);
  return [await response.text(), Number(response.headers.get("X-Next-Offset"))];
}

// Calls `changed` after each change, and `linked` with whether the controller can be reached. The browser reconnects by itself.
export function follow(changed, linked) {
  const source = new EventSource("/v1/stream");
  source.onopen = () => linked(true);
  source.onmessage = () => changed();
  source.onerror = () => {
    linked(false);
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(changed, linked), 2000);
  };
}
