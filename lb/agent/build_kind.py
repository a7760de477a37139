"""How this process runs the load balancer: compiled or as Python modules, and why it is not compiled.

`hatch_build.py` compiles the hot modules for wheels. Where the compilation fails, or the compiled modules do not fit the machine to
which they are copied (`lb.agent.native_files`), the Python modules run and a file beside them has the reason (`NOTE`).
"""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import lb
from lb.agent import native_files
from lb.config.decode import is_visible
from lb.config.stats import MAX_REASON, Build, BuildKind
from lb.core import api_keys

NOTE = Path(lb.__file__).parents[1] / native_files.NOTE


def own_build(*, fast_path: bool, slow_tls: str = "", workers: int = 1) -> Build:
    """Return the build of this process. `fast_path`: it has opened the helper in C; `slow_tls`: why not for TLS."""
    return replace(build_of(api_keys.__file__, NOTE, fast_path=fast_path), slow_tls=slow_tls, workers=workers)


def build_of(module_file: str, note: Path, *, fast_path: bool) -> Build:
    """Return the build of a process that has loaded a hot module from `module_file`. No file `note`: nothing is known to be wrong."""
    if module_file.endswith(tuple(EXTENSION_SUFFIXES)):
        return Build(BuildKind.NATIVE, fast_path)
    try:
        text = note.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    line = " ".join(text.split())
    reason = "".join(char for char in line if is_visible(char))[:MAX_REASON]
    return Build(BuildKind.INTERPRETED, fast_path, reason)
