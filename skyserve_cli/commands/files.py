"""From a service file and the flags beside it to a spec."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from provisioners.local.translate import copy_problems
from provisioners.port.base import is_url
from provisioners.remote.bootstrap_steps import missing_source
from skyserve_cli.config import load_config
from skyserve_cli.controller.reconcile.resource_match import copies_of
from skyserve_cli.home import Home
from skyserve_cli.output import WrongUsage, inform
from skyserve_cli.spec import FileMount, Problem, ServiceSpec, SpecError
from skyserve_cli.spec.load import Loaded, load_file
from skyserve_cli.spec.problems import SpecWarning, dotted
from skyserve_cli.starter import fit


def load(
    file: Path,
    *,
    name: str | None = None,
    env: Sequence[str] | None = None,
    env_file: Path | None = None,
    secret: Sequence[str] | None = None,
    secret_file: Path | None = None,
    changes: Sequence[str] | None = None,
) -> Loaded:
    """Return the spec with its secrets; its warnings are said. Raises SpecError with every problem, WrongUsage."""
    loaded = read(
        file, name=name, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    for warning in loaded.warnings:
        inform(f"warning: {warning}")
    return loaded


def with_team(changes: Sequence[str] | None, team: str | None) -> list[str]:
    """Return the changes of `--set` with the team of `--team`."""
    return [*(changes or ()), *([] if team is None else [f"service.team={team}"])]


def read(
    file: Path,
    *,
    name: str | None = None,
    env: Sequence[str] | None = None,
    env_file: Path | None = None,
    secret: Sequence[str] | None = None,
    secret_file: Path | None = None,
    changes: Sequence[str] | None = None,
    to_run: bool = True,
) -> Loaded:
    """As `load`, but prints nothing.

    Without `to_run` the file is only checked: values that are missing, and copies that need another cloud than is enabled
    here, are warnings.
    """
    enabled = load_config(Home.from_environment(os.environ).config).enabled
    loaded = load_file(
        file,
        name=name,
        env_overrides=_variables("--env", env, env_file),
        secret_overrides=_variables("--secret", secret, secret_file),
        environ=os.environ,
        set_overrides=changes or (),
        enabled=enabled,
        needs_values=to_run,
    )
    spec = anchored(loaded.spec, Path.cwd())
    problems, beyond = [*_missing(spec)], [*_beyond_this_machine(spec, enabled)]
    is_warning = not to_run and any(choice.cloud is None for choice in spec.resources)
    if not is_warning:
        problems += beyond
    if problems:
        raise SpecError(problems)
    warnings = [SpecWarning(each.path, each.message) for each in beyond if is_warning]
    loaded = replace(loaded, spec=spec)
    return replace(
        loaded, warnings=tuple(dict.fromkeys((*loaded.warnings, *warnings, *fit.warnings(loaded))))
    )


def _missing(spec: ServiceSpec) -> Iterator[Problem]:
    """Yield what the file names and is not there: better said now than by the first replica."""
    if spec.workdir is not None and not is_url(spec.workdir) and not Path(spec.workdir).is_dir():
        yield Problem("workdir", f"{spec.workdir} is not a folder", spec.workdir)
    for mount in spec.file_mounts:
        for source in mount.sources:
            wrong = missing_source(source)
            if wrong is not None:
                yield Problem(dotted(("file_mounts", mount.path)), wrong, source)
    if spec.tls is not None:
        for key, path in (("keyfile", spec.tls.keyfile), ("certfile", spec.tls.certfile)):
            if not Path(path).is_file():
                yield Problem(f"service.tls.{key}", f"{path} is not a file", path)


def _beyond_this_machine(spec: ServiceSpec, enabled: Sequence[str]) -> Iterator[Problem]:
    """Copies that the local cloud cannot make, of a service that can run nowhere else."""
    anywhere = [name for name in enabled if name != "local"] or enabled
    if {cloud for choice in spec.resources for cloud in ([choice.cloud] if choice.cloud else anywhere)} != {
        "local"
    }:
        return
    for mount in spec.file_mounts:
        for target, source in copies_of([mount]).items():
            for why in copy_problems(target, source):
                yield Problem(dotted(("file_mounts", mount.path)), why, source)


def anchored(spec: ServiceSpec, folder: Path) -> ServiceSpec:
    """Local paths made absolute: the controller runs elsewhere.

    A relative path starts where the command is given, as in SkyPilot.
    """

    def absolute(path: str) -> str:
        return path if is_url(path) else str(folder / Path(path).expanduser())

    def mount(each: FileMount) -> FileMount:
        return replace(each, sources=tuple(absolute(source) for source in each.sources))

    tls = spec.tls
    return replace(
        spec,
        workdir=None if spec.workdir is None else absolute(spec.workdir),
        file_mounts=tuple(mount(each) for each in spec.file_mounts),
        tls=None
        if tls is None
        else replace(tls, keyfile=absolute(tls.keyfile), certfile=absolute(tls.certfile)),
    )


def _variables(option: str, given: Sequence[str] | None, file: Path | None) -> dict[str, str]:
    """Return the values of the file, overridden by those of the command line."""
    values = {} if file is None else _read(option, file)
    for item in given or ():
        name, equals, value = item.partition("=")
        if not equals:
            if name not in os.environ:
                raise WrongUsage(f"{option} {name}: has no value, and {name} is not in your environment")
            value = os.environ[name]
        values[name] = value
    return values


def _read(option: str, path: Path) -> dict[str, str]:
    """NAME=VALUE lines; blank lines, `#` comments, a leading `export` and quotes around a value are understood."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise WrongUsage(f"{option}-file {path}: {reason}") from None
    values = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            # Not quoted here: the line may be a secret.
            raise WrongUsage(f"{option}-file {path}: line {number} is not NAME=VALUE")
        values[name.strip()] = _unquoted(value.strip())
    return values


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
