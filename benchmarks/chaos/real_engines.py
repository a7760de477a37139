"""A real vLLM without a GPU, from a virtual environment of its own.

`scripts/real_engines.sh` makes it, and a tiny model, in the folder that SKYSERVE_REAL_ENGINES names (default:
`~/.cache/skyserve/real-engines`). Nothing is downloaded here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.fleet import Command

CONTEXT_TOKENS = 2048
_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def folder() -> Path:
    """Return where `scripts/real_engines.sh` installs."""
    named = os.environ.get("SKYSERVE_REAL_ENGINES")
    return Path(named) if named else Path.home() / ".cache" / "skyserve" / "real-engines"


def has_vllm() -> bool:
    return (folder() / "vllm" / "bin" / "vllm").is_file() and (folder() / "model" / "config.json").is_file()


def vllm_command(port: str, *, sequences: int = 16) -> Sequence[str]:
    """Return the command of a real vLLM with the tiny model, which takes up to `sequences` requests at a time."""
    variables = [f"{name}={value}" for name, value in _VLLM_ENVIRONMENT.items()]
    return (
        # The environment of chaos names the packages of this interpreter, which are not vLLM's.
        "env", "-u", "PYTHONPATH", *variables, str(folder() / "vllm" / "bin" / "vllm"), "serve", str(folder() / "model"),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port,
        "--max-model-len", str(CONTEXT_TOKENS), "--dtype", "float32", "--enforce-eager",
        "--max-num-seqs", str(sequences), "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip


def vllm_engine() -> Command:
    return lambda port: vllm_command(str(port))
