"""A service file before it is text: what it will say, and the commented YAML of it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import yaml

from skyserve_cli.starter.engines import Engine
from skyserve_cli.starter.sizes import Weights, memory_gb

COMMENT_COLUMN = 34
WIDTH = 100
ROOM = 1.2  # of the weights: activations, and a KV cache for short requests
LEAST_ROOM_GB = 1.0
#: What is rented widely, from small to large.
LADDER = ("L4", "L40S", "A100-80GB", "H100", "H200", "B200")
MOST_ALTERNATIVES = 4
LOCAL = "local"
#: Repositories whose owners give access to who agreed to a licence.
GATED = ("meta-llama/", "google/", "mistralai/", "black-forest-labs/", "CohereLabs/")


@dataclass(slots=True, kw_only=True)
class Draft:
    """What the file will say. `accelerators` are alternatives; none: a machine without one. `notes` are what the user should know."""

    name: str
    run: str
    port: int
    engine: Engine | None = None
    model: str | None = None
    probe: str = "/"
    probe_settings: dict[str, float] = field(default_factory=dict)
    image: str | None = None
    setup: str | None = None
    envs: dict[str, str | None] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    file_mounts: dict[str, str] = field(default_factory=dict)
    accelerators: tuple[str, ...] = ()
    is_split: bool = False  # over all accelerators of a replica, by an option that `run` does not have yet
    why_accelerators: str = ""
    memory_gb: int = 16
    clouds: tuple[str, ...] = ()
    use_spot: bool = False
    notes: list[str] = field(default_factory=list)


def text_of(draft: Draft) -> str:
    """Return the YAML of a draft, with comments."""
    parts = [_head(draft), [f"name: {draft.name}"], _service(draft), _resources(draft), *_variables(draft)]
    if draft.file_mounts:
        parts.append(
            ["file_mounts:", *(f"  {_scalar(at)}: {_scalar(of)}" for at, of in draft.file_mounts.items())]
        )
    if draft.setup:
        parts.append(_script("setup", draft.setup))
    parts.append(_script("run", draft.run))
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def gpus_for(weights: Weights | None, count: int | None) -> tuple[tuple[str, ...], int]:
    """Return accelerators whose memory the model fits in, small ones first, and how many of each a replica needs.

    With `count` that many; nothing fits: the empty tuple. A model of unknown size gets the smallest.
    """
    need = LEAST_ROOM_GB if weights is None else weights.gb * ROOM + LEAST_ROOM_GB
    for number in (1, 2, 4, 8) if count is None else (count,):
        fitting = tuple(name for name in LADDER if (memory_gb(name, None) or 0) * number >= need)
        # One of the largest kind is rarer, and dearer, than several of a common one.
        if fitting and (count is not None or fitting[0] in LADDER[:4]):
            return fitting[:MOST_ALTERNATIVES], number
    return (), count or 1


def memory_for(weights: Weights | None) -> int:
    """Return the GB of main memory for an engine without an accelerator."""
    need = 12.0 if weights is None else weights.gb * ROOM + 4
    return int(2 ** max(3, math.ceil(math.log2(need))))


def slug(model: str) -> str:
    """Return the name of a service for a model: ``Qwen/Qwen2.5-7B-Instruct`` is ``qwen2-5-7b-instruct``."""
    last = model.rstrip("/").rpartition("/")[2]
    name = re.sub(r"(?i)\.safetensors$|[-._:](gguf|i?q\d\w*)(?=[-._:]|$)", "", last)
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:40].strip("-")
    return name or "service"


def _head(draft: Draft) -> list[str]:
    title = draft.engine.title if draft.engine else "A server"
    lines = [
        f"# {title}, written by `serve init`. Next: `serve validate FILE`, `serve plan FILE`, `serve up FILE`.",
    ]
    return [*lines, *comment_lines(draft.notes, "To know:")]


def comment_lines(notes: Sequence[str], title: str) -> list[str]:
    """Return notes as a list in comments, below their title."""
    if not notes:
        return []
    lines = [f"# {title}"]
    for note in notes:
        first, *others = textwrap.wrap(
            " ".join(note.split()), WIDTH, break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines += [f"#   - {first}", *(f"#     {line}" for line in others)]
    return lines


def _service(draft: Draft) -> list[str]:
    ready = "responds with 200 once the server is ready"
    slow = (
        "the image and the weights are loaded until then"
        if draft.engine
        else "time to start, before a replica is given up"
    )
    settings = {"initial_delay_seconds": 1800.0, **draft.probe_settings}
    lines = ["service:", "  readiness_probe:", _line(f"    path: {_scalar(draft.probe)}", ready)]
    lines += [
        _line(f"    {key}: {value:g}", slow if key == "initial_delay_seconds" else "")
        for key, value in settings.items()
    ]
    return [*lines, _line("  replicas: 1", "replica_policy instead scales with the load")]


def _resources(draft: Draft) -> list[str]:
    lines = ["resources:"]
    if len(draft.clouds) == 1:
        lines.append(f"  infra: {draft.clouds[0]}")
    if draft.accelerators:
        several = len(draft.accelerators) > 1
        counts = [each.partition(":") for each in draft.accelerators]
        text = ", ".join(f"{name}: {count or 1}" for name, _, count in counts)
        text = f"{{{text}}}" if several else draft.accelerators[0]
        why = draft.why_accelerators + ("; the cheapest is taken" if several else "")
        lines.append(_line(f"  accelerators: {text}", why.removeprefix("; ")))
    elif draft.clouds != (LOCAL,):
        lines += ["  cpus: 4+", f"  memory: {draft.memory_gb}+"]
    if draft.use_spot:
        lines.append(_line("  use_spot: true", "cheap, and taken back at any moment"))
    if draft.image is not None:
        here = draft.clouds == (LOCAL,)
        text = f"  image_id: {_scalar(f'docker:{draft.image}')}"
        lines.append(
            f"  # {text.strip()}   # for other clouds: the local one has no containers" if here else text
        )
    lines.append(_line(f"  ports: {draft.port}", "where the server listens"))
    if len(draft.clouds) > 1:
        lines += ["  any_of:", *(f"    - infra: {cloud}" for cloud in draft.clouds)]
    return lines


def _variables(draft: Draft) -> Iterator[list[str]]:
    if draft.envs:
        yield ["envs:", *(f"  {name}: {_scalar(value)}" for name, value in draft.envs.items())]
    if draft.secrets:
        given = "from your environment, or --secret {}"
        yield ["secrets:", *(_line(f"  {name}: null", given.format(name)) for name in draft.secrets)]


def _script(key: str, text: str) -> list[str]:
    return [f"{key}: |", *(f"  {line}" if line else "" for line in text.rstrip("\n").splitlines())]


def _line(text: str, comment: str = "") -> str:
    if not comment:
        return text
    if len(text) > COMMENT_COLUMN:
        return f"{' ' * (len(text) - len(text.lstrip()))}# {comment}\n{text}"
    return f"{text.ljust(COMMENT_COLUMN)} # {comment}"


def _scalar(value: str | None) -> str:
    """Return the value as YAML writes it in one line, in quotes where it would be read as something else."""
    if value is None:
        return "null"
    text = yaml.safe_dump(
        value, width=math.inf, default_style='"' if "\n" in value else None, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
