"""llama.cpp's own server, from the wheel of `xllamacpp`: what the program `llama-server` runs, without compiling it.

    python -m benchmarks.chaos.llama_server -m tiny.gguf --alias m --port 8080

Takes those arguments of `llama-server` that the benchmarks and examples give it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import xllamacpp

_CACHE = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "f16": xllamacpp.ggml_type.GGML_TYPE_F16}
_ATTENTION = {
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="llama.cpp's own server, from the wheel of xllamacpp.", allow_abbrev=False
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-tb", "--threads-batch", type=int)
    parser.add_argument("-ctk", "--cache-type-k", choices=_CACHE, default="f16")
    parser.add_argument("-ctv", "--cache-type-v", choices=_CACHE, default="f16")
    parser.add_argument("-fa", "--flash-attn", choices=_ATTENTION, default="auto")
    parser.add_argument("--chat-template-file", type=argparse.FileType(encoding="utf-8"))
    for name in ("--metrics", "--slots", "--no-warmup", "--no-webui"):
        parser.add_argument(name, action="store_true")
    for name in ("--jinja", "-cb"):  # on in any case
        parser.add_argument(name, action="store_true")
    given = parser.parse_args(arguments)
    asked = xllamacpp.CommonParams()
    asked.model.path = given.model
    asked.hostnames, asked.port = [given.host], given.port
    asked.n_ctx, asked.n_parallel = given.ctx_size, given.parallel
    asked.warmup, asked.ui = not given.no_warmup, not given.no_webui
    asked.endpoint_metrics, asked.endpoint_slots = given.metrics, given.slots
    asked.cache_type_k, asked.cache_type_v = _CACHE[given.cache_type_k], _CACHE[given.cache_type_v]
    asked.flash_attn_type = _ATTENTION[given.flash_attn]
    if given.alias:
        asked.model_alias = {given.alias}
    if given.threads:
        asked.cpuparams.n_threads = given.threads
    if given.threads_batch or given.threads:
        asked.cpuparams_batch.n_threads = given.threads_batch or given.threads
    if given.chat_template_file:
        asked.chat_template = given.chat_template_file.read()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the server's threads start, which inherit it
    server = xllamacpp.Server(asked)
    print(server.listening_address, flush=True)
    signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
