"""The port of TLS in front of a replica, as the machine's folder has it. Imports little: each status reads it."""

from __future__ import annotations

from pathlib import Path

from provisioners.remote.host_agent.files import read_json

LOCK = "front.lock"
PORT_FILE = "front.json"


def port_of(folder: Path) -> int | None:
    """Return where `tls_proxy` listens."""
    found = read_json(folder / PORT_FILE)
    return None if found is None else int(found["port"])


def why_interpreted(folder: Path) -> str:
    """Return why TLS is Python's, and not that of `tls_relay`; empty where it is not, or is none."""
    return str((read_json(folder / PORT_FILE) or {}).get("interpreted", ""))
