// A chat through the endpoint of a service, and what the load balancer did for each message.

import { get } from "./api.js";
import { el } from "./dom.js";
import { seconds } from "./format.js";

export function chat(name) {
  const messages = [];
  const said = el("div", { role: "log", "aria-label": "Chat", tabindex: "0", class: "chat" });
  const text = el("textarea", { rows: 2, "aria-label": "Message", placeholder: "A message to the model" });
  const key = el("input", { type: "password", "aria-label": "API key", placeholder: "API key, if the service needs one", autocomplete: "off" });
  const button = el("button", { onclick: send }, "Send");
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(); });

  async function send() {
    const content = text.value.trim();
    if (!content || button.disabled) return;
    button.disabled = true;
    text.value = "";
    messages.push({ role: "user", content });
    const reply = el("p", {}), about = el("p", { class: "muted" }, "waiting");
    said.append(el("p", {}, el("b", {}, content)), reply, about);
    try {
      const done = await streamed(name, messages, key.value, reply);
      messages.push({ role: "assistant", content: reply.textContent });
      about.textContent = await story(name, done);
    } catch (error) {
      about.className = "bad";
      about.textContent = error.message;
      messages.pop();
    }
    said.scrollTop = said.scrollHeight;
    button.disabled = false;
  }
  return [said, el("p", {}, text), el("p", {}, key, " ", button)];
}

// Appends the tokens to `reply` as they come. Returns the request's id and the time to the first one, in seconds.
async function streamed(name, messages, key, reply) {
  const begin = performance.now();
  const headers = { "Content-Type": "application/json", ...(key ? { "X-Skyserve-Key": key } : {}) };
  const response = await fetch(`/v1/services/${encodeURIComponent(name)}/chat`, { method: "POST", headers, body: JSON.stringify({ messages }) });
  if (!response.ok) throw new Error(why(await response.text(), response.status));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let first = null, rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return { id: response.headers.get("X-Request-Id"), first };
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: {"))) {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const token = event.choices?.[0]?.delta?.content;
      if (token) { first ??= (performance.now() - begin) / 1000; reply.append(token); }
    }
  }
}

function why(text, status) {
  try { const { error } = JSON.parse(text); return error.message || error; } catch { return `the endpoint returned ${status}`; }
}

// Which replica responded and why, how much of the prompt it had, and where the stream went on.
async function story(name, { id, first }) {
  const parts = [`first token after ${seconds(first)}`];
  const { requests } = await get(`/v1/services/${name}/explain?limit=100`);
  const found = requests.find((one) => one.request_id === id);
  const chosen = found ? found.steps.filter((step) => step.target) : [];
  const targets = chosen.map((step) => step.target).filter((target, place, all) => target !== all[place - 1]);
  if (targets.length) parts.unshift(`replica ${targets[0]}${targets.slice(1).map((target) => `, then ${target}`).join("")}`);
  const choice = chosen.find((step) => step.why);
  if (choice) parts.push(choice.why);
  const matched = Math.max(0, ...chosen.map((step) => step.matched_bytes || 0));
  if (matched) parts.push(`${matched} bytes of the prompt expected in its cache`);
  return parts.join("; ");
}
