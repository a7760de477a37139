"""Record what a real engine responds to chats and completions: fixtures of tests that need no engine.

    python -m tests.engines.record http://127.0.0.1:8000 tests/unit/data/vllm_chats.json

Each case is a request, its status, and the data of its events, or its body if it is no stream. Stop strings and stop
tokens that are to be met are taken from the engine's own text.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
_CHAT = {"messages": [{"role": "user", "content": "hi"}]}
_PROMPT = {"prompt": "The sea"}
_USAGE = {"stream_options": {"include_usage": True}}
_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_IDS = {"return_token_ids": True}
_BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": _USAGE,
    "counted": _COUNTED,
    "ids": _IDS,
    "stop_unmet": {**_IDS, "stop": ["zqzqzq"], "max_tokens": 6},
    "sampled_n": {**_USAGE, "n": 2, "temperature": 0.9, "seed": 3, "max_tokens": 2},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat_{name}": (CHAT, {**_CHAT, "stream": True, **more}) for name, more in _BOTH.items()},
    **{f"completion_{name}": (COMPLETIONS, {**_PROMPT, "stream": True, **more}) for name, more in _BOTH.items()},
    "chat_tools": (CHAT, {**_CHAT, "stream": True, "tools": [TOOL]}),
    "chat_logprobs": (CHAT, {**_CHAT, "stream": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 2}),
    "chat_whole": (CHAT, _CHAT),
    "chat_whole_ids": (CHAT, {**_CHAT, **_IDS}),
    "completion_echo": (COMPLETIONS, {**_PROMPT, "stream": True, "echo": True}),
    "completion_two_prompts": (COMPLETIONS, {"prompt": ["The sea", "A ship"], "stream": True, **_USAGE}),
    "completion_logprobs": (COMPLETIONS, {**_PROMPT, "stream": True, "logprobs": 1, "max_tokens": 2}),
    "completion_whole": (COMPLETIONS, _PROMPT),
    "completion_whole_ids": (COMPLETIONS, {**_PROMPT, **_IDS}),
}  # fmt: skip


def record(url: str) -> dict[str, Any]:
    recorded = {name: _ask(url, path, body) for name, (path, body) in CASES.items()}
    for prefix, path, body in (("chat", CHAT, _CHAT), ("completion", COMPLETIONS, _PROMPT)):
        said = [
            choice
            for data in recorded[f"{prefix}_ids"].get("events", [])
            if data != "[DONE]"
            for choice in json.loads(data)["choices"]
        ]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in said)
        ids = [token for choice in said for token in choice.get("token_ids") or []]
        middle = text[len(text) // 2 :][:3]
        asked = {**body, "stream": True, **_IDS}
        recorded[f"{prefix}_stop_met"] = _ask(url, path, {**asked, "stop": ["zqzqzq", middle]})
        recorded[f"{prefix}_stop_kept"] = _ask(
            url, path, {**asked, "stop": [middle], "include_stop_str_in_output": True}
        )
        if ids:
            recorded[f"{prefix}_stop_token"] = _ask(url, path, {**asked, "stop_token_ids": [ids[2]]})
    return recorded


def _ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 4, **body}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text, status = response.read().decode(), response.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    found = {"path": path, "request": body, "status": status}
    if body.get("stream") and status == 200:
        return found | {"events": [line[6:] for line in text.splitlines() if line.startswith("data: ")]}
    return found | {"body": text}


if __name__ == "__main__":
    cases = record(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
