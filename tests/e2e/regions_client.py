"""A client that sends requests all the time."""

from __future__ import annotations

import threading
import urllib.request


class Client:
    """`failed` are the requests that failed or whose response did not begin as it should."""

    def __init__(self, url: str, expected: bytes) -> None:
        self.url = url
        self.responded = 0
        self.failed: list[str] = []
        self._expected = expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    @staticmethod
    def asks(url: str) -> bytes:
        """One response; empty if there is none."""
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                body: bytes = answer.read()
                return body
        except OSError:
            return b""

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.05):
            try:
                with urllib.request.urlopen(self.url, timeout=30) as answer:
                    body = answer.read()
            except OSError as error:
                self.failed.append(repr(error))
                continue
            if body.startswith(self._expected):
                self.responded += 1
            else:
                self.failed.append(repr(body[:100]))
