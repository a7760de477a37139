"""Verbs that a controller runs on a host every few seconds import little: each start compiles what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from provisioners.remote.host_agent.bundle import agent_bundle

LOADED = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); at_start = set(sys.modules)\n"
    "from provisioners.remote.host_agent.__main__ import main\n"
    "main(sys.argv[2:]); print(json.dumps(sorted(set(sys.modules) - at_start)), file=sys.stderr)"
)
HEAVY = ("asyncio", "email", "http", "logging", "ssl", "tempfile", "urllib.request")


@pytest.mark.parametrize("words", ["status {}", "log {} 0 10", "go {}", "claims {}", "start {}"])
def test_a_verb_imports_no_client_and_no_server(words: str, tmp_path: Path) -> None:
    archive = tmp_path / "agent.pyz"
    archive.write_bytes(agent_bundle())
    verb, *rest = words.format(tmp_path).split()
    # -I: what a site has put in the way of every start is not ours
    command = [sys.executable, "-I", "-S", "-c", LOADED, str(archive), verb, *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = json.loads(done.stderr.splitlines()[-1])
    assert "provisioners.remote.host_agent.__main__" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
