"""What in a service file does not fit together although every key is right: ports, addresses and memory of known engines.

Each function yields warnings, and only what is certain: what a variable hides is taken for right. Figures warn from a tenth beyond
what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from skyserve_cli.spec.load import Loaded
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.spec.problems import SpecWarning
from skyserve_cli.spec.references import referenced, substitute
from skyserve_cli.starter.engines import SGLANG, TGI, VLLM, Launch, launches
from skyserve_cli.starter.sizes import (
    LocalModel,
    Weights,
    local_model,
    memory_gb,
    tokens_of,
    weights_of_name,
)
from skyserve_cli.starter.words import Word

MARGIN = 1.1
LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Where a replica without `ports` is expected: on machines of its own always there, in a cluster too; else at a port that varies.
_USUAL_PORT: Mapping[str | None, int | None] = {"local": None, "kubernetes": 8080}
_ELSEWHERE = frozenset(("--cpu-offload-gb", "--device", "--cpu-offload", "--offload-group-size"))
_QUANTIZATION = (
    "--quantization",
    "-q",
    "--quantize",
    "--torchao-config",
    "--load-format",
    "--revision",
    "--hf-overrides",
)
_PLAIN_FORMATS = frozenset(
    ("auto", "safetensors", "pt", "none", "dummy", "runai_streamer", "fastsafetensors")
)


def warnings(loaded: Loaded) -> Iterator[SpecWarning]:
    """Yield what does not fit together in a file whose keys are right."""
    spec = loaded.spec
    if spec.scaling.max_replicas == 0 and not spec.schedule:
        message = "the size is fixed at 0: no replica is launched, and no request can change that"
        yield SpecWarning("service", message)
    found = [_filled(launch, spec) for launch in launches(spec.run)]
    if not found:
        return
    yield from _ports(loaded, found)
    yield from _addresses(spec, found)
    for launch in found:
        if (
            launch.engine in (VLLM, SGLANG, TGI)
            and not launch.is_open
            and not _ELSEWHERE & set(launch.options)
        ):
            yield from _memory(loaded, launch)


def _filled(launch: Launch, spec: ServiceSpec) -> Launch:
    """Return the command with the variables of `envs` filled in that the script does not set itself."""
    values = {
        name: value for name, value in spec.envs if not re.search(rf"(?<![\w$]){name}=|\bread\b", spec.run)
    }

    def filled(word: Word) -> Word:
        if not word.expands or "`" in word.raw or not referenced(word.text) <= values.keys():
            return word  # a variable of the image, perhaps
        text = substitute(word.text, values)
        return word._replace(text=text, expands="$" in text)

    assigned = dict(launch.assignments)
    given = {name: Word(value, value) for name, value in values.items() if name not in assigned}
    return Launch(
        launch.engine,
        launch.program,
        tuple(filled(word) for word in launch.arguments),
        (*given.items(), *((name, filled(word)) for name, word in launch.assignments)),
    )


# --- ports and addresses ---


def _ports(loaded: Loaded, found: list[Launch]) -> Iterator[SpecWarning]:
    """Yield a warning if no command listens where requests go, as far as that can be seen."""
    spec = loaded.spec
    listened = [launch.port for launch in found]
    if None in listened:
        return
    port, engine = listened[0], found[0].engine.title
    where = f"--port {port}" if found[0].says_port else f"{port}, its default"
    if spec.port is None:
        usual = {_USUAL_PORT.get(choice.cloud, 8000) for choice in spec.resources}
        used = re.search(r"SKYSERVE_REPLICA_PORT|SKYPILOT_SERVE", f"{spec.run}\n{spec.setup or ''}")
        if not used and not usual & set(listened):
            message = (
                f"{engine} listens on {where}, and requests go to $SKYSERVE_REPLICA_PORT; "
                f"write ports: {port} under resources, or --port $SKYSERVE_REPLICA_PORT in run"
            )
            yield SpecWarning("run", message)
        return
    others = "\n".join((spec.run, spec.setup or "", *(value for _, value in spec.envs)))
    if spec.port in listened or re.search(rf"(?<!\d){spec.port}(?!\d)", others):
        return
    path = loaded.path_of(0, "ports")
    if len(spec.ports) > 1 or not path.endswith(".ports"):
        path = "service.ports"
    message = f"requests go to {spec.port}, and {engine} listens on {where}; write {port} here, or --port {spec.port} in run"
    yield SpecWarning(path, message)


def _addresses(spec: ServiceSpec, found: list[Launch]) -> Iterator[SpecWarning]:
    """Yield a warning for an engine that only its own machine can reach."""
    if spec.port is None and all(choice.cloud == "local" for choice in spec.resources):
        return
    for launch in found:
        host = launch.engine.host_option and launch.value((launch.engine.host_option,))
        if host and host.text in LOOPBACK and len(found) == 1:
            message = (
                f"{launch.engine.title} listens on {host.text}, where only the replica's own machine reaches it; "
                f"write {launch.engine.host_option} 0.0.0.0"
            )
            yield SpecWarning("run", message)


# --- memory ---


class _Gpus(NamedTuple):
    """`used` of the `total` accelerators of a replica, of `gb` each."""

    name: str
    gb: float
    used: int
    total: float

    def __str__(self) -> str:
        text = f"{self.used} x {self.name} {'has' if self.used == 1 else 'have'} {self.gb * self.used:g} GB"
        if self.used < self.total:
            text += f" (the command uses {self.used} of {self.total:g})"
        return text


def _memory(loaded: Loaded, launch: Launch) -> Iterator[SpecWarning]:
    spec, model = loaded.spec, launch.model
    if model is None or model.expands:
        return
    at = _folder(spec, model.text)
    local = None if at is None else local_model(at)
    weights = _weights(launch, model.text, local)
    yield from _context(launch, local)
    for index, choice in enumerate(spec.resources):
        path = loaded.path_of(index, "accelerator")
        wanted = _wanted(launch)
        total = choice.accelerator_count * spec.num_nodes
        if choice.accelerator is None or total <= 0:
            continue
        if wanted is not None and wanted > total:
            message = (
                f"run splits the model over {wanted} GPUs; a replica has {total:g} ({choice.accelerator})"
            )
            yield SpecWarning(path, message)
            continue
        gpus = _gpus(choice, wanted, total)
        if gpus is None or weights is None:
            continue
        if weights.gb > MARGIN * gpus.gb * gpus.used:
            yield SpecWarning(path, f"{model.text} does not fit: {weights}; {gpus}")
        elif (cache := _cache(launch, local)) is not None:
            tokens, gb = cache
            if weights.gb + gb > MARGIN * gpus.gb * gpus.used:
                message = (
                    f"{model.text} does not fit with a context of {tokens:,} tokens: {weights} and {gb:.0f} GB of KV cache "
                    f"for one request; {gpus}; lower {launch.engine.context_options[0]}"
                )
                yield SpecWarning(path, message)


def _wanted(launch: Launch) -> int | None:
    """Return over how many GPUs the engine splits the model; None if that cannot be seen."""
    tensor, pipeline = (
        launch.count(launch.engine.tensor_options),
        launch.count(launch.engine.pipeline_options),
    )
    if launch.engine is TGI and launch.value(("--num-shard",)) is None:
        return None  # it takes all GPUs
    return None if tensor is None or pipeline is None else tensor * pipeline


def _gpus(choice: ResourceChoice, wanted: int | None, total: float) -> _Gpus | None:
    gb = memory_gb(choice.accelerator or "", choice.cloud)
    if gb is None or total < 1:
        return None
    return _Gpus(choice.accelerator or "", gb, int(total) if wanted is None else wanted, total)


def _weights(launch: Launch, model: str, local: LocalModel | None) -> Weights | None:
    """Return the least that the weights take: of a folder that is here what is in it, else by the name."""
    given = [word.text.lower() for name in _QUANTIZATION if (word := launch.options.get(name)) is not None]
    said = [word for word in given if word not in _PLAIN_FORMATS]
    if local is not None and local.weights is not None:
        return None if said else local.weights
    if model.startswith(("/", ".", "~")):
        return None
    dtype = launch.value(("--dtype",))
    return weights_of_name(model, said[0] if said else None, dtype.text if dtype else None)


def _cache(launch: Launch, local: LocalModel | None) -> tuple[int, float] | None:
    """Return the longest context and the GB of KV cache that one such request takes; None if that is not known."""
    if local is None or local.kv_bytes is None or launch.engine is TGI:
        return None
    kind = launch.value(("--kv-cache-dtype",))
    size = {"": 1.0, "auto": 1.0, "bfloat16": 1.0, "fp8": 0.5, "fp8_e4m3": 0.5, "fp8_e5m2": 0.5}.get(
        kind.text if kind else ""
    )
    tokens = _tokens(launch) or local.longest
    if size is None or tokens is None:
        return None
    return tokens, local.kv_bytes * size * tokens / 1e9


def _context(launch: Launch, local: LocalModel | None) -> Iterator[SpecWarning]:
    tokens = _tokens(launch)
    known = local is not None and local.longest is not None and tokens is not None
    scaled = {"--hf-overrides", "--rope-scaling", "--json-model-override-args"} & set(launch.options)
    allowed = any("ALLOW_LON" in name for name, _ in launch.assignments)
    if known and not scaled and not allowed and tokens > MARGIN * local.longest:  # type: ignore[operator, union-attr]
        message = f"{launch.engine.context_options[0]} {tokens} is beyond the {local.longest} positions of the model"  # type: ignore[union-attr]
        yield SpecWarning("run", message)


def _tokens(launch: Launch) -> int | None:
    word = launch.value(launch.engine.context_options)
    return None if word is None or word.expands else tokens_of(word.text)


def _folder(spec: ServiceSpec, model: str) -> Path | None:
    """Return where the folder that a replica sees under this path is on this machine; None if it is not here."""
    for mount in spec.file_mounts:
        inside = re.fullmatch(rf"{re.escape(mount.path.rstrip('/'))}(?:/(.*))?", model)
        if inside and len(mount.sources) == 1 and "://" not in mount.sources[0]:
            return Path(mount.sources[0]).expanduser() / (inside[1] or "")
    if spec.workdir is not None and not model.startswith(("/", "~")):
        here = Path(spec.workdir).expanduser() / model
        return here if here.is_dir() else None
    on_this_machine = all(choice.cloud == "local" for choice in spec.resources)
    return Path(model).expanduser() if on_this_machine and model.startswith(("/", "~")) else None
