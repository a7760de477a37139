"""A service file, from text to `ServiceSpec`: the whole way on one page (`load_text`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyserve_cli.spec.build import build
from skyserve_cli.spec.candidates import Origin
from skyserve_cli.spec.infra import CLOUDS
from skyserve_cli.spec.json_text import MAX_BYTES
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.spec.not_yet import not_yet_warnings
from skyserve_cli.spec.problems import Loc, Problem, SpecError, SpecWarning, dotted, shown
from skyserve_cli.spec.rules import warnings as rule_warnings
from skyserve_cli.spec.schema import ServiceFile
from skyserve_cli.spec.variables import Substitution, gather
from skyserve_cli.spec.whole_file import NAME, checked_file, service_name
from skyserve_cli.spec.yaml_tree import read_value, read_yaml

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file that is right. `secret_values` are beside the spec, and never part of a repr."""

    spec: ServiceSpec
    warnings: tuple[SpecWarning, ...] = ()
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)
    origins: tuple[Origin, ...] = ()
    """Of each of `spec.resources`."""
    own_name: str | None = None
    """What the file's own `name` key says."""

    def path_of(self, choice: int, field_name: str) -> str:
        """Return the key that says this field of the alternative of that index."""
        return self.origins[choice].get(field_name, "resources")


def load_file(
    path: str | Path,
    *,
    name: str | None = None,
    env_overrides: Mapping[str, str] = _NOTHING,
    secret_overrides: Mapping[str, str] = _NOTHING,
    environ: Mapping[str, str] = _NOTHING,
    set_overrides: Sequence[str] = (),
    enabled: Sequence[str] = CLOUDS,
    needs_values: bool = True,
) -> Loaded:
    """Read the file and `load_text` it; the service is called like the file unless it has a name.

    Raises SpecError, also if the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError([Problem("", f"cannot read {path}: {reason}")]) from error
    if len(data) > MAX_BYTES:
        raise SpecError(
            [Problem("", f"{path} is larger than {MAX_BYTES >> 10} KiB, which no service file is")]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})"
        raise SpecError([Problem("", message)]) from error
    return load_text(
        text,
        source=str(path),
        name=name,
        env_overrides=env_overrides,
        secret_overrides=secret_overrides,
        environ=environ,
        set_overrides=set_overrides,
        enabled=enabled,
        needs_values=needs_values,
    )


def load_text(
    text: str,
    *,
    source: str = "<string>",
    name: str | None = None,
    env_overrides: Mapping[str, str] = _NOTHING,
    secret_overrides: Mapping[str, str] = _NOTHING,
    environ: Mapping[str, str] = _NOTHING,
    set_overrides: Sequence[str] = (),
    enabled: Sequence[str] = CLOUDS,
    needs_values: bool = True,
) -> Loaded:
    """`name`, `env_overrides`, `secret_overrides` and `set_overrides` win over the file; `environ` fills what the file leaves empty.

    `enabled` are the clouds that "any cloud" means here, for the warnings. Without `needs_values` a variable or secret that
    has none is a warning. Raises SpecError with every problem at once.
    """
    tree, problems = _read(text, source)
    warnings = _hoist(tree, problems)
    problems += apply_overrides(tree, set_overrides)

    variables = gather(tree, env_overrides, secret_overrides, environ)
    substitution = Substitution(variables)
    tree = substitution.apply(tree)
    problems += variables.problems + substitution.problems

    checked = checked_file(tree, variables, environ)
    problems += checked.problems
    missing = [*variables.missing, *checked.keys.missing]
    if needs_values:
        problems += missing
    file = checked.file
    if file is None:
        raise SpecError(problems)
    given = name if name is not None else _name_in_file(file, source, warnings)
    own_name = service_name(given, checked, problems)
    if problems or file.service is None:
        raise SpecError(problems)

    spec = build(file, file.service, own_name, checked.candidates, variables, checked.keys.keys)
    warnings += [
        *substitution.warnings,
        *checked.candidates.warnings,
        *rule_warnings(spec),
        *not_yet_warnings(tree, enabled),
        *(SpecWarning(each.path, each.message) for each in missing if not needs_values),
    ]
    origins = tuple(checked.candidates.origins.values())
    return Loaded(spec, tuple(dict.fromkeys(warnings)), variables.secrets, origins, file.name)


def _read(text: str, source: str) -> tuple[dict[str, Any], list[Problem]]:
    tree, problems = read_yaml(text)
    if isinstance(tree, dict):
        return tree, problems
    if tree is None:
        raise SpecError([Problem("", f"{source} is empty")])
    kind = "a list" if isinstance(tree, list) else "a single value"
    raise SpecError(
        [Problem("", f"{source} must be a mapping with the keys service, resources and run, not {kind}")]
    )


def _hoist(tree: dict[str, Any], problems: list[Problem]) -> list[SpecWarning]:
    """Return the SkyServe paper's Listing 1 indents `setup` and `run` under `resources`: move them where they belong."""
    resources = tree.get("resources")
    warnings = []
    for key in ("setup", "run"):
        if not isinstance(resources, dict) or key not in resources:
            continue
        if tree.get(key) is not None:
            problems.append(
                Problem(f"resources.{key}", f"belongs at the top, where there is a {key} already")
            )
        else:
            tree[key] = resources[key]
            warnings.append(
                SpecWarning(f"resources.{key}", "belongs at the top; it is read as if it stood there")
            )
        del resources[key]
    return warnings


def _name_in_file(file: ServiceFile, source: str, warnings: list[SpecWarning]) -> str:
    """Return what the file calls the service, or else what the file is called."""
    name = file.name
    if name is None:
        return name_from_path(source)
    dashed = re.sub(r"[._]+", "-", name)
    if dashed == name or not NAME.fullmatch(dashed):
        return name
    # SkyPilot's `name` is that of a task, where these are allowed.
    message = f"the name of a service has no dots or underscores; {shown(name)} is called {shown(dashed)}"
    warnings.append(SpecWarning("name", message))
    return dashed


def name_from_path(path: str) -> str:
    """``examples/My_LLM.sky.yaml`` -> ``my-llm``; ``service`` when nothing usable is left."""
    stem = re.sub(r"(\.sky)?\.ya?ml$", "", Path(path).name.lower())
    name = re.sub(r"[^a-z0-9]+", "-", stem).lstrip("-0123456789")[:63].rstrip("-")
    return name if name and not path.startswith("<") else "service"


_WORD, _INDEX, _QUOTED = r"([^.=\[\]]+)", r"\[([0-9]{1,4})\]", r"\[\"([^\"]+)\"\]"
# A word is separated by a dot, always: with an optional one this could be read in exponentially many ways.
_PATH = re.compile(rf"{_WORD}(?:\.{_WORD}|{_INDEX}|{_QUOTED})*")
_STEP = re.compile(f"{_INDEX}|{_QUOTED}|{_WORD}")


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each ``path=value`` into `tree`; the value is read as YAML.

    A path that starts with a key of the whole file (``resources.accelerators``) is taken from the top, any other
    (``replica_policy.max_replicas``) from `service`. In a file that says `replicas: N`, a key of `replica_policy`
    turns that into its longer form, `min_replicas: N`: the two may not stand side by side, and a user who sets
    the one means to drop the other. `readiness_probe: /health` becomes `path: /health` in the same way.
    """
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not _PATH.fullmatch(path.strip()):
            problems.append(Problem("", f"--set takes PATH=VALUE (got {shown(override)})", override))
            continue
        loc = _loc(path.strip())
        try:
            value = read_value(text, loc)
        except SpecError as error:
            problems.extend(Problem(dotted(loc), f"--set: {each}") for each in error.problems)
            continue
        if loc[:2] == ("service", "replica_policy"):
            _lengthen(tree.get("service"))
        if loc[:2] == ("service", "readiness_probe") and len(loc) > 2:
            _lengthen_probe(tree.get("service"))
        obstacle = _write(tree, loc, value)
        if obstacle is not None:
            problems.append(Problem(dotted(loc), f"--set cannot reach it: {obstacle}"))
    return problems


def _loc(path: str) -> Loc:
    steps = tuple(int(match[1]) if match[1] else match[2] or match[3] for match in _STEP.finditer(path))
    return steps if steps[0] in ServiceFile.model_fields else ("service", *steps)


def _lengthen(service: object) -> None:
    """`replicas: N` as `replica_policy: {min_replicas: N}`."""
    if isinstance(service, dict) and service.get("replica_policy") is None:
        replicas = service.pop("replicas", None)
        if replicas is not None:
            service["replica_policy"] = {"min_replicas": replicas}


def _lengthen_probe(service: object) -> None:
    """`readiness_probe: /health` as `readiness_probe: {path: /health}`."""
    if isinstance(service, dict) and isinstance(service.get("readiness_probe"), str):
        service["readiness_probe"] = {"path": service["readiness_probe"]}


def _write(tree: Any, loc: Loc, value: object) -> str | None:
    """None, or why there is no such place. Mappings on the way are made if they are missing."""
    *way, last = loc
    for depth, step in enumerate(way):
        if isinstance(step, int):
            if not isinstance(tree, list) or step >= len(tree):
                return f"{dotted(loc[: depth + 1])} is not there"
            tree = tree[step]
        elif isinstance(tree, dict):
            if tree.get(step) is None:
                if any(isinstance(later, int) for later in loc[depth + 1 :]):
                    return f"{dotted(loc[: depth + 1])} is not there"
                tree[step] = {}
            tree = tree[step]
        else:
            break
    if isinstance(last, str) and isinstance(tree, dict):
        tree[last] = value
        return None
    if isinstance(last, int) and isinstance(tree, list) and last < len(tree):
        tree[last] = value
        return None
    return f"{dotted(loc[:-1])} is not a {'list that long' if isinstance(last, int) else 'mapping'}"
