"""A page that counts its visits per visitor, in memory: `python3 app.py PORT`."""

import os
import secrets
import sys
from collections import Counter
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

visits: Counter[str] = Counter()


class Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.respond("")
            return
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("visitor")
        visitor = cookie.value if cookie else secrets.token_hex(16)
        visits[visitor] += 1
        replica = os.environ.get("SKYSERVE_REPLICA_ID", "?")
        self.respond(f"visit {visits[visitor]} to replica {replica}\n", visitor)

    def respond(self, text: str, visitor: str = "") -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        if visitor:
            self.send_header("Set-Cookie", f"visitor={visitor}; HttpOnly; SameSite=Lax; Path=/")
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Page).serve_forever()  # noqa: S104
