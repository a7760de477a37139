"""The service file for a service of a compose file. The values in it are text, as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from provisioners.durations import seconds_of
from skyserve_cli.starter.command import SECRET, from_container, variables_of
from skyserve_cli.starter.container import Container, NoContainer, gpus_of, inner_ports
from skyserve_cli.starter.draft import Draft, slug
from skyserve_cli.starter.words import Word, commands, unusable, word_of

#: Keys of a service that are carried over.
_CARRIED = frozenset(
    (
        "image",
        "command",
        "entrypoint",
        "environment",
        "env_file",
        "ports",
        "expose",
        "volumes",
        "deploy",
        "healthcheck",
        "gpus",
    )
)
#: Keys that a service needs no word for, with the reason.
_NEEDLESS = {
    "container_name": "replicas have names of their own",
    "restart": "replicas that end are replaced",
    "runtime": "machines with GPUs have it",
    "network_mode": "a container uses the network of its machine",
    "networks": "a container uses the network of its machine",
    "profiles": "a file describes one service",
    "pull_policy": "each new machine pulls the image",
    "tty": "a server needs no terminal",
    "stdin_open": "a server needs no terminal",
}
#: Times of a health check, and ours.
_TIMES = {
    "start_period": "initial_delay_seconds",
    "interval": "endpoint_probe_interval_seconds",
    "timeout": "timeout_seconds",
}
SLOW_START_S = 1800.0
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?[-?+])([^}]*))?\}|(\w+))")


class ComposeError(ValueError):
    """The file describes no service that can be carried over; the message gives the reason."""


def service_names(text: str) -> list[str]:
    """Return the names of the services that have an image. Raises ComposeError."""
    return [name for name, service in _services(text).items() if service.get("image")]


def from_compose(text: str, name: str, folder: Path) -> Draft:
    """Return the draft for one service of the file, which is in `folder`. Raises ComposeError."""
    services = _services(text)
    if name not in services:
        raise ComposeError(f"there is no service {name}; there are {', '.join(services)}")
    service = services[name]
    if (letter := unusable("".join(_texts_in(service)))) is not None:
        raise ComposeError(f"{name} has a character that no shell should get, {letter}")
    if not service.get("image"):
        raise ComposeError(f"{name} has no image: push the one that it builds to a registry, and name it")
    values = _environment_file(folder / ".env")
    container = _container(service, values, folder)
    try:
        draft = from_container(container, folder)
    except NoContainer as error:
        raise ComposeError(f"{name}: {error}") from None
    for variable in _used(service, values):
        if variable in draft.run and variable not in {*draft.envs, *draft.secrets}:
            variables_of(draft, [(variable, None)])
    for other in services:
        if other != name:
            draft.notes.append(f"not carried over: the service {other} of the compose file")
    draft.name = slug(draft.model) if draft.model else slug(name)
    return draft


def _services(text: str) -> dict[str, dict[str, Any]]:
    try:
        tree = _merged(yaml.load(text, Loader=yaml.BaseLoader))  # noqa: S506, which makes text only
    except (yaml.YAMLError, RecursionError) as error:
        raise ComposeError(f"not valid YAML: {error}") from None
    services = tree.get("services") if isinstance(tree, dict) else None
    if not isinstance(services, dict) or not services:
        raise ComposeError("no `services`: this is no compose file")
    return {name: service for name, service in services.items() if isinstance(service, dict)}


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
    else:
        yield str(value)


def _merged(value: Any) -> Any:
    """Return the tree with ``<<`` filled in."""
    if isinstance(value, list):
        return [_merged(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = {key: _merged(each) for key, each in value.items() if key != "<<"}
    sources = value.get("<<", [])
    for source in sources if isinstance(sources, list) else [sources]:
        own = {**_merged(source), **own} if isinstance(source, dict) else own
    return own


def _container(service: Mapping[str, Any], values: Mapping[str, str], folder: Path) -> Container:
    found = Container(_filled(str(service["image"]), values))
    found.arguments = _words(service.get("command"), values)
    if service.get("entrypoint"):
        found.entrypoint = _words(service["entrypoint"], values)
    found.envs = _environment(service, folder)
    found.ports = inner_ports(
        _texts(service.get("ports"), "target", values) + _texts(service.get("expose"), "", values)
    )
    found.volumes = [_filled(each, values) for each in _volumes(service.get("volumes"))]
    _gpus(service, found)
    _health(service.get("healthcheck"), found)
    for key, value in service.items():
        if key in _NEEDLESS:
            found.dropped.append(f"{key} ({_NEEDLESS[key]})")
        elif key not in _CARRIED and not key.startswith("x-"):
            found.dropped.append(f"{key}: {_short(value)}")
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _words(value: Any, values: Mapping[str, str]) -> list[Word]:
    """Return a command, which is a list or a line, as words of a shell, with the variables filled in that have a value."""
    if value is None or value == "":
        return []
    if isinstance(value, list):
        texts = [_known(str(each), values) for each in value]
        return [word_of(_plain(text), keep_variables="$" in text) for text in texts]
    found = commands(_plain(_known(str(value), values)).replace("\n", " "))
    return [word for command in found for word in command.words]


def _known(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the variables filled in that have a value, and are no credentials; `$$` stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        default = match[3] if (match[2] or "").endswith("-") else None
        found = values.get(name) or default
        return match[0] if found is None or SECRET.search(name) else found

    return "$$".join(_VARIABLE.sub(value, part) for part in text.split("$$"))


def _plain(text: str) -> str:
    return text.replace("$$", "$")


def _references(text: str) -> list[re.Match[str]]:
    return list(_VARIABLE.finditer(text.replace("$$", "")))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with variables filled in: from the file `.env`, or by their defaults."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        return values.get(name) or (
            match[3] or "" if (match[2] or "").endswith("-") else values.get(name, "")
        )

    return _VARIABLE.sub(value, text)


def _used(service: Mapping[str, Any], values: Mapping[str, str]) -> list[str]:
    """Return the variables of the command that have no value here."""
    command = service.get("command") or []
    texts = [str(each) for each in command] if isinstance(command, list) else [str(command)]
    return [match[1] or match[4] for text in texts for match in _references(_known(text, values))]


def _environment(service: Mapping[str, Any], folder: Path) -> dict[str, Word | None]:
    found: dict[str, Word | None] = {}
    files = service.get("env_file") or []
    for file in files if isinstance(files, list) else [files]:
        path = file.get("path", "") if isinstance(file, dict) else str(file)
        found |= {name: word_of(value) for name, value in _environment_file(folder / path).items()}
    given = service.get("environment") or {}
    if isinstance(given, list):
        pairs = [str(each).partition("=") for each in given]
        given = {name: value if equals else None for name, equals, value in pairs}
    given = _mapping(given)
    for name, value in given.items():
        if value is None:
            found[name] = None
            continue
        text = _plain(str(value))
        found[name] = word_of(text, keep_variables=bool(_references(str(value))))
    return found


def _environment_file(path: Path) -> dict[str, str]:
    """Return NAME=VALUE lines of a file, nothing if it is not there."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = [
        line.strip().removeprefix("export ").partition("=")
        for line in lines
        if not line.strip().startswith("#")
    ]
    return {name.strip(): value.strip().strip("'\"") for name, equals, value in pairs if equals}


def _texts(value: Any, key: str, values: Mapping[str, str]) -> list[str]:
    if value is None:
        return []
    entries = value if isinstance(value, list) else [value]
    texts = [str(each.get(key, "")) if isinstance(each, dict) else str(each) for each in entries]
    return [_filled(text, values) for text in texts]


def _volumes(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else []
    return [
        f"{each.get('source', '')}:{each.get('target', '')}" if isinstance(each, dict) else str(each)
        for each in entries
    ]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _gpus(service: Mapping[str, Any], found: Container) -> None:
    if service.get("gpus"):
        found.wants_gpu = True
        found.gpus = gpus_of(str(service["gpus"]))
    deploy = _mapping(service.get("deploy"))
    resources = _mapping(deploy.get("resources"))
    reservations = _mapping(resources.get("reservations"))
    devices = reservations.get("devices")
    for device in map(_mapping, devices if isinstance(devices, list) else ()):
        found.wants_gpu = True
        ids = device.get("device_ids")
        found.gpus = len(ids) if isinstance(ids, list) else gpus_of(str(device.get("count", "")))
    given = {f"deploy.{key}": value for key, value in deploy.items() if key != "resources"}
    given |= {f"deploy.resources.{key}": value for key, value in resources.items() if key != "reservations"}
    given |= {
        f"deploy.resources.reservations.{key}": value
        for key, value in reservations.items()
        if key != "devices"
    }
    found.dropped += [f"{key}: {_short(value)}" for key, value in given.items()]


def _health(check: Any, found: Container) -> None:
    """Take the path of a check that requests a URL, and its times."""
    if not isinstance(check, dict):
        return
    test = check.get("test", "")
    text = " ".join(map(str, test)) if isinstance(test, list) else str(test)
    match = re.search(r"https?://[^/\s'\"]+(/[^\s'\"|;)]*)?", text)
    if match is None:
        found.dropped.append(f"healthcheck: {_short(test)}")
        return
    found.probe = match[1] or "/"
    for key, value in check.items():
        ours, seconds = _TIMES.get(key), seconds_of(str(value))
        if key == "start_period" and seconds is not None and seconds < SLOW_START_S:
            found.dropped.append(f"healthcheck.{key}: {value} (a machine has to load the image first)")
        elif ours is not None and seconds:
            found.probe_settings[ours] = seconds
        elif key != "test":
            found.dropped.append(f"healthcheck.{key}: {_short(value)}")
