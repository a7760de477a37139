"""`envs` and `secrets`: where their values come from, and where they go.

A value is looked for on the command line, then in the file, then (for an empty key) in the user's environment.
Environment variables are substituted into `service`, `file_mounts`, `workdir` and `volumes`, never into `setup`
and `run`: these are shell scripts and see the variables when they run. A secret's reference stays a reference, so
that its value never becomes part of the spec; the readiness probe alone can use one (`Probe.resolved`). A local
path is no secret even if it is given as one: it is filled in, with a warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyserve_cli.spec.model import json_inner
from skyserve_cli.spec.problems import Loc, Problem, SpecWarning, dotted, shown
from skyserve_cli.spec.references import NAME, referenced, substitute

_SUBSTITUTED = ("service", "file_mounts", "workdir", "volumes")
_PROBE: Loc = ("service", "readiness_probe")
_POST_DATA: Loc = (*_PROBE, "post_data")
_LOCAL_PATHS: tuple[Loc, ...] = (
    ("service", "tls", "keyfile"),
    ("service", "tls", "certfile"),
    ("workdir",),
    ("workdir", "path"),
)
_OURS = "SKYSERVE_"


@dataclass(slots=True)
class Variables:
    """Names with their values, and what was wrong with them."""

    envs: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    declared: frozenset[str] = frozenset()
    """Every name in the file, also those whose value is still missing."""
    secret_names: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    """Names without a value. A replica cannot start without them; the file can be checked."""


def gather(
    tree: Mapping[str, Any],
    env_overrides: Mapping[str, str],
    secret_overrides: Mapping[str, str],
    environ: Mapping[str, str],
) -> Variables:
    """Return the variables of the file. Sections of the wrong kind are left for the schema to refuse."""
    found = Variables()
    envs = {**_declared(tree.get("envs"), "envs", found.problems), **env_overrides}
    secrets = {**_declared(tree.get("secrets"), "secrets", found.problems), **secret_overrides}
    _give_values(envs, "envs", "--env", environ, found.envs, found)
    _give_values(secrets, "secrets", "--secret", environ, found.secrets, found)
    for name in envs.keys() & secrets.keys():
        found.problems.append(Problem(dotted(("secrets", name)), "is also one of envs; keep one of them"))
    found.declared = frozenset(envs) | frozenset(secrets)
    found.secret_names = tuple(secrets)
    return found


def _declared(section: object, key: str, problems: list[Problem]) -> dict[str, Any]:
    if isinstance(section, dict):
        # ``secrets:NAME`` is how SkyPilot refers to a secret its server keeps; ours come from the user.
        prefix = "secrets:" if key == "secrets" else ""
        return {name.removeprefix(prefix): value for name, value in section.items()}
    names: dict[str, Any] = {}
    if isinstance(section, list) and key == "secrets":
        for index, item in enumerate(section):
            if isinstance(item, str):
                names[item.removeprefix("secrets:")] = None
            else:
                problems.append(Problem(dotted((key, index)), "must be the name of a secret"))
    return names


def _give_values(
    declared: Mapping[str, Any],
    section: str,
    option: str,
    environ: Mapping[str, str],
    values: dict[str, str],
    found: Variables,
) -> None:
    for name, value in declared.items():
        path = dotted((section, name))
        if not NAME.fullmatch(name):
            found.problems.append(
                Problem(path, "is not a name for a variable: letters, digits and _ only", name)
            )
        elif name.startswith(_OURS):
            found.problems.append(Problem(path, f"names that start with {_OURS} are given by us", name))
        elif isinstance(value, str):
            if "\0" in value:
                found.problems.append(Problem(path, "holds a NUL character, which no process can be given"))
            values[name] = value
        elif value is not None:
            found.problems.append(Problem(path, "must be a word, not a list or a mapping"))
        elif name in environ:
            values[name] = environ[name]
        else:
            message = f"has no value: pass {option} {name}=VALUE, or export {name}"
            found.missing.append(Problem(path, message))


class Substitution:
    """Fills the variables in; collects what it could not."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self.problems: list[Problem] = []
        self.warnings: list[SpecWarning] = []

    def apply(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: self._filled(value, (key,)) if key in _SUBSTITUTED else value for key, value in tree.items()
        }

    def _filled(self, value: Any, loc: Loc) -> Any:
        if isinstance(value, str):
            return self._text(value, loc)
        if isinstance(value, list):
            return [self._filled(item, (*loc, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return self._mapping(value, loc)
        return value

    def _mapping(self, mapping: dict[str, Any], loc: Loc) -> dict[str, Any]:
        filled: dict[str, Any] = {}
        for key, value in mapping.items():
            new_key = self._text(key, (*loc, key))
            if new_key in filled:
                message = f"is the same as another key once variables are filled in ({shown(new_key)})"
                self.problems.append(Problem(dotted((*loc, key)), message, key))
            filled[new_key] = self._filled(value, (*loc, key))
        return filled

    def _text(self, text: str, loc: Loc) -> str:
        names = referenced(text)
        if not names:
            return text
        secret = names & set(self._variables.secret_names)
        values, keep = self._variables.envs, self._variables.secret_names
        if secret and loc in _LOCAL_PATHS:
            message = f"the secret {min(secret)} is used as a path: its value is stored and shown"
            self.warnings.append(SpecWarning(dotted(loc), message))
            values, keep = {**values, **self._variables.secrets}, ()
        elif secret and loc[0] == "service" and loc[:2] != _PROBE:
            message = f"the secret {min(secret)} cannot be used here: its value would be stored and shown"
            hint = "secrets can be used in service.readiness_probe, in setup and in run"
            self.problems.append(Problem(dotted(loc), message, hint=hint))

        def unknown(name: str) -> None:
            if name not in self._variables.declared:
                message = f"${name} is neither in envs nor in secrets; it is left as written"
                self.warnings.append(SpecWarning(dotted(loc), message))

        # The text of a JSON document: a value must not end the string it stands in.
        quote = json_inner if loc == _POST_DATA else str
        return substitute(text, values, keep=keep, quote=quote, unknown=unknown)
