"""Ask for a long response and print it word by word: `python3 ask.py URL [TOKENS]`. Exits with 1 if it is cut short."""

import json
import sys
import urllib.request

url, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300
question = {
    "model": "llama-3.1-8b",
    "stream": True,
    "max_tokens": tokens,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "Tell me a saga of a machine that did not last."}],
}
request = urllib.request.Request(  # noqa: S310
    f"{url}/v1/chat/completions",
    json.dumps(question).encode(),
    {"Content-Type": "application/json"},
)
finished = False
with urllib.request.urlopen(request) as answer:  # noqa: S310
    for line in answer:
        if not line.startswith(b"data: {"):
            finished = finished or line.startswith(b"data: [DONE]")
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            sys.exit(f"\n{chunk['error']['message']}")
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
print()
sys.exit(0 if finished else "the stream broke off")
