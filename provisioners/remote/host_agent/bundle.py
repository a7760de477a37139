"""This folder and `provisioners.files` as one file that any Python runs: `python3 agent.pyz VERB …`.

This module itself is not part of it.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

from provisioners.remote.host_agent.tls_relay import LIBRARY

_EPOCH = (2020, 1, 1, 0, 0, 0)  # so that the same code is the same file
_START = b"""import sys

from provisioners.remote.host_agent.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


@cache
def agent_bundle(*, native: bool = True) -> bytes:
    """Return the file, with the library of `tls_relay` if it was compiled. Without `native` TLS is Python's."""
    folder = Path(__file__).parent
    files = {"__main__.py": _START, "provisioners/__init__.py": b"", "provisioners/remote/__init__.py": b""}
    files["provisioners/files.py"] = (folder.parents[1] / "files.py").read_bytes()
    for path in sorted(folder.glob("*.py")):
        if path.name != Path(__file__).name:
            files[f"provisioners/remote/host_agent/{path.name}"] = path.read_bytes()
    if native and (folder / LIBRARY).exists():
        files[f"provisioners/remote/host_agent/{LIBRARY}"] = (folder / LIBRARY).read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
