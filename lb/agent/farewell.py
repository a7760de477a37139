"""What an agent in a Pod does before it is stopped: it takes itself out of the Service, and waits for those whom it holds.

    python -m lb.agent.farewell --port 30998 --token-file FILE --least 5 --most 60

`least` seconds pass until no node sends new connections here; then, at most until `most`, requests that wait for a replica get one. A
signal comes after that, and turns away who is still held. Exit code 0, whatever happens: the signal must come.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.25
_TIMEOUT_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lb.agent.farewell", description="Drain an agent.")
    parser.add_argument("--host", default=os.environ.get("POD_IP") or "127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--least", type=float, default=5.0)
    parser.add_argument("--most", type=float, default=60.0)
    given = parser.parse_args()
    try:
        token = given.token_file.read_text(encoding="utf-8").strip()
        _call(given.host, given.port, token, "POST", "/-/drain")
        time.sleep(given.least)
        for _ in range(int((given.most - given.least) / _POLL_S)):
            if not _held(given.host, given.port, token):
                break
            time.sleep(_POLL_S)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        print(f"the agent cannot be drained: {error}", file=sys.stderr)
        time.sleep(given.least)
    return 0


def _held(host: str, port: int, token: str) -> int:
    return int(_call(host, port, token, "GET", "/-/stats?window_s=1")["queued"])


def _call(host: str, port: int, token: str, method: str, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise ValueError(f"{method} {path} got {response.status}")
        found = json.loads(body)
        if not isinstance(found, dict):
            raise ValueError(f"{method} {path} got no object")
        return found
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
