"""What a container is started with, by `docker run` or by a compose file, as a draft of a service file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyserve_cli.starter.words import Word

#: Options of `docker run` without a value.
_FLAGS = frozenset(
    [
        "-d",
        "--detach",
        "--rm",
        "-i",
        "-t",
        "-it",
        "-ti",
        "-itd",
        "-dit",
        "--interactive",
        "--tty",
        "--privileged",
        "--init",
        "-P",
        "--publish-all",
        "--read-only",
        "--no-healthcheck",
        "--oom-kill-disable",
        "--sig-proxy",
    ]
)
#: Options that a service needs no word for.
_NEEDLESS = frozenset(
    "-d --detach --rm -i -t -it -ti -itd -dit --interactive --tty --name --init --pull --restart --network --net --runtime".split()  # noqa: SIM905
)
_ALIASES = {"--env": "-e", "--publish": "-p", "--volume": "-v", "--workdir": "-w"}
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]|\{)")


@dataclass(slots=True)
class Container:
    """A container's image, arguments and surroundings. `ports` are those inside, `gpus` how many it has; None: all or unknown."""

    image: str
    arguments: list[Word] = field(default_factory=list)
    entrypoint: list[Word] | None = None
    envs: dict[str, Word | None] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    gpus: int | None = None
    wants_gpu: bool = False
    probe: str | None = None
    probe_settings: dict[str, float] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


class NoContainer(ValueError):
    """The command or the file starts no container that a service could be; the message gives the reason."""


def docker_run(words: Sequence[Word]) -> Container:
    """Return the container of ``docker run …`` (without these two words). Raises NoContainer."""
    found = Container("")
    index = 0
    while index < len(words) and words[index].text.startswith("-"):
        word = words[index]
        index += 1
        name, equals, value = word.text.partition("=")
        if not name.startswith("--") and len(name) > 2 and name not in _FLAGS:
            name, value, equals = word.text[:2], word.text[2:].removeprefix("="), "="
        if name in _FLAGS:
            given = Word("", "")
        elif equals:
            given = Word(value, value, word.expands)
        elif index < len(words):
            given = words[index]
            index += 1
        else:
            break
        _take(found, _ALIASES.get(name, name), given)
    if index >= len(words):
        raise NoContainer("docker run names no image")
    found.image = words[index].text
    found.arguments = list(words[index + 1 :])
    return found


def _take(found: Container, name: str, given: Word) -> None:
    """Book one option of `docker run`."""
    text = given.text
    if name == "-e":
        variable, equals, value = text.partition("=")
        found.envs[variable] = Word(value, value, bool(_VARIABLE.search(value))) if equals else None
    elif name == "-p":
        found.ports += inner_ports([text])
    elif name == "-v":
        found.volumes.append(text)
    elif name == "--gpus":
        found.wants_gpu = True
        found.gpus = gpus_of(text)
    elif name == "--entrypoint":
        found.entrypoint = [given]
    elif name not in _NEEDLESS:
        found.dropped.append(f"{name} {text}".strip())


def gpus_of(text: str) -> int | None:
    """Return how many ``2``, ``count=2`` or ``"device=0,1"`` are; None for ``all``."""
    text = text.strip("\"'")
    if match := re.search(r"device=([\w,-]+)", text):
        return len(match[1].split(","))
    match = re.search(r"\d+", text)
    return int(match[0]) if match else None


def inner_ports(texts: Sequence[str]) -> list[int]:
    """Return the ports inside of the container of ``8080:80``, ``127.0.0.1:8080:80/tcp`` or ``80``."""
    found = []
    for text in texts:
        inner = text.partition("/")[0].rpartition(":")[2]
        if inner.isdecimal():
            found.append(int(inner))
    return found


def mounts_of(volumes: Sequence[str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return files that are copied to replicas, by their path there, and notes on the volumes that are not.

    A cache is filled again by each replica; what is not here cannot be copied.
    """
    mounts: dict[str, str] = {}
    notes = []
    for volume in volumes:
        source, colon, rest = volume.partition(":")
        target = rest.partition(":")[0]
        where = folder / Path(source).expanduser()
        if not colon or "$" in source:
            notes.append(
                f"volume {volume}: not carried over; a path of this machine can be copied with file_mounts"
            )
        elif re.search(r"\.cache|huggingface|/data$|\.ollama|ollama", f"{source} {target}"):
            kept = "write `cache: node` to keep them on nodes of Kubernetes and on your own hosts"
            notes.append(f"volume {volume}: not carried over; each replica downloads its models; {kept}")
        elif source.startswith((".", "/", "~")) and where.exists():
            mounts[target] = str(where) if source.startswith(("/", "~")) or folder != Path() else source
        else:
            notes.append(
                f"volume {volume}: not carried over; {source} is not here. file_mounts copies files to each replica"
            )
    return mounts, notes
