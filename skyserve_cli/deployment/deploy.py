"""`serve controller deploy`, step by step. Every step looks first, so a second run completes the first one or upgrades it."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from provisioners.port.commands import HostConnection, ShellError
from provisioners.ssh.pool import load_pools
from skyserve_cli.config import Config
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.remote import LOCAL, Contexts, Remote
from skyserve_cli.controller.balancers.native_modules import choose, look, native_sets
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.deployment import host as there
from skyserve_cli.deployment.host import HostFacts
from skyserve_cli.deployment.target import DeployTarget
from skyserve_cli.deployment.wheel import own_wheel
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage

HEALTH_TIMEOUT_S = 60.0
CHECK_TIMEOUT_S = 180.0  # it may call every region of a cloud
POLL_S = 0.25
EXTRAS = ("aws", "gcp", "azure", "kubernetes")
_DEFAULT_KNOWN_HOSTS = "~/.ssh/known_hosts"


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """`serve` is the path of a `serve` on the host: nothing is installed then. `python` makes the environment otherwise.

    `config_file` is copied in place of the home's config.yaml.
    """

    context: str
    serve: str | None = None
    python: str = "python3"
    copy_files: bool = False
    replace_config: bool = False
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """A host on which everything is ready to be started. `config` is the content of config.yaml there, if there is one."""

    target: DeployTarget
    home: Home
    shell: HostConnection
    facts: HostFacts
    serve: str
    config: bytes | None
    report: Callable[[str], None] = field(repr=False)

    @property
    def client(self) -> ControllerClient:
        return ControllerClient(self.home, self.target.remote)

    @property
    def release(self) -> bytes:
        """Return what runs there, or is to run: equal for equal programs and configurations."""
        digest = hashlib.sha256(self.config or b"").hexdigest()
        return json.dumps({"serve": self.serve, "config": digest}).encode()

    def at(self, path: str) -> str:
        """Return a path in the controller's home there."""
        return f"{self.facts.home}/{path}"


def extras_of(config: Config) -> tuple[str, ...]:
    """Return the extras with the SDKs that a controller with this configuration needs."""
    backup = config.controller.backup
    needed = {*config.enabled, *(() if backup is None else (backup.place.extra,))}
    return tuple(name for name in EXTRAS if name in needed)


def prepare(
    home: Home,
    config: Config,
    target: DeployTarget,
    shell: HostConnection,
    options: DeployOptions,
    report: Callable[[str], None],
) -> Deployment:
    """Install serve and copy config.yaml; start nothing. Raises CommandFailed or ShellError."""
    insist_on_context(home, target.remote, options.context)
    facts = there.look(shell, target.remote.home)
    if options.serve is None:
        choice = choose(native_sets(home.native), look(shell, [options.python]))
        wheel = own_wheel(choice)
        extras = extras_of(config)
        report(f"installing {wheel.file_name} on {target.host}")
        if choice is not None and choice.why:
            report(f"the load balancers beside that controller will be interpreted: {choice.why}")
        serve = there.install(shell, facts, wheel, extras, options.python)
    else:
        serve = options.serve
        if shell.run([serve, "--version"], check=False).code != 0:
            raise WrongUsage(f"--serve: {target.host} has no program {serve} that responds to --version")
    shell.run(f"umask 077; mkdir -p {shlex.quote(facts.home)} && chmod 700 {shlex.quote(facts.home)}")
    content = _configure(home, config, target, shell, facts, options, report)
    return Deployment(target, home, shell, facts, serve, content, report)


def insist_on_context(home: Home, remote: Remote, name: str) -> None:
    """Raise WrongUsage if the name is taken."""
    if name == LOCAL:
        raise WrongUsage(f"--context: {LOCAL} is the controller of this home; choose another name")
    known = Contexts.of(home).remotes.get(name)
    if known is not None and known != remote:
        raise WrongUsage(f"--context: {name} is the context of {known.url}; choose another name")


def deploy(deployment: Deployment, context: str) -> dict[str, Any]:
    """Start the controller there, or start it again if something is new; add the context. Raises CommandFailed."""
    facts, shell = deployment.facts, deployment.shell
    if facts.is_incoming:
        raise CommandFailed(
            f"{deployment.target.host}: {facts.home} is being filled by a move; complete it with "
            f"`serve controller move {deployment.target.name}`"
        )
    before = shell.read(deployment.at("deployed.json"))
    is_new = not facts.is_running or before != deployment.release
    keeper = "systemd" if facts.has_systemd else "keeper"
    if is_new:
        deployment.report(f"starting the controller on {deployment.target.host}")
        keeper = there.start(shell, facts, deployment.serve)
    health = await_health(deployment)
    shell.put(deployment.at("deployed.json"), deployment.release)
    add_context(deployment, context)
    return {
        "host": deployment.target.host,
        "home": facts.home,
        "serve": deployment.serve,
        "version": health["version"],
        "pid": health["pid"],
        "kept_by": keeper,
        "started": is_new,
    }


def wrong_clouds(deployment: Deployment) -> list[str]:
    """Return a sentence for each thing that keeps the controller there from using one of its clouds, by `serve check` there."""
    words = ("check", "-o", "json")
    try:
        printed = there.serve_there(
            deployment.shell,
            deployment.facts,
            deployment.serve,
            *words,
            timeout_s=CHECK_TIMEOUT_S,
            check=False,
        )
        checked = json.loads(printed.out)
    except ShellError as error:
        return [error.message]
    except ValueError:
        return [f"`serve check` failed there: {printed.said}"]
    found = []
    for one in checked:
        failed = [each for each in one["findings"] if not each["ok"]]
        found += [f"{one['cloud']}: {each['what']}: {each['message']}" for each in failed]
        if not failed and not one["usable"]:
            found.append(f"{one['cloud']}: {one['why']}")
    return found


def add_context(deployment: Deployment, name: str, *, use: bool = False) -> None:
    """Add the context of the controller there to this home; with `use` the commands call it from now on."""
    contexts = Contexts.of(deployment.home)
    remotes = {**contexts.remotes, name: deployment.target.remote}
    Contexts(name if use else contexts.current, remotes).write(deployment.home)


def await_health(deployment: Deployment) -> dict[str, Any]:
    """Return the health of the controller there, once it leads. Raises CommandFailed with the last line of its log."""
    clock, client = SteadyClock(), deployment.client
    ends_at, said = clock.now() + HEALTH_TIMEOUT_S, ""
    while clock.now() < ends_at:
        try:
            health = client.health()
            if health["lease"]["leads"]:
                return health
            said = "it stands by"
        except (*AWAY, RefusedError) as error:
            said = str(error)
        time.sleep(POLL_S)
    log = deployment.shell.run(
        f"tail -n 1 {shlex.quote(deployment.at('logs/controller.log'))}", check=False
    ).out.decode(errors="replace")
    raise CommandFailed(
        f"the controller on {deployment.target.host} does not respond within {HEALTH_TIMEOUT_S:g} s ({said}); "
        f"its log ends with: {log.strip() or 'nothing'}"
    )


# --- config.yaml ----------------------------------------------------------------------------------------------


def _configure(
    home: Home,
    config: Config,
    target: DeployTarget,
    shell: HostConnection,
    facts: HostFacts,
    options: DeployOptions,
    report: Callable[[str], None],
) -> bytes | None:
    """Have config.yaml and the files that it names there; return the content of the former. Raises WrongUsage."""
    path = f"{facts.home}/config.yaml"
    known = shell.read(path, max_bytes=1 << 20) if facts.has_config else None
    source_file = options.config_file or home.config
    if not source_file.exists():
        return known
    text = source_file.read_text(encoding="utf-8")
    named = named_files(text)
    lacking = set(there.missing_files(shell, [one.path for one in named]))
    missing = [one for one in named if one.path in lacking]
    rewritten = with_paths(text, missing, f"{facts.home}/files") if options.copy_files else text
    if known is not None and not options.replace_config and known not in (text.encode(), rewritten.encode()):
        report(
            f"kept the config.yaml of {target.host}, which differs from the one here (--replace-config replaces it)"
        )
        return known
    defaults = [_DEFAULT_KNOWN_HOSTS] if _uses_default_known_hosts(config) else []
    lacking_defaults = there.missing_files(shell, defaults)
    if not options.copy_files:
        _insist_on_none(
            [*((one.key, one.path) for one in missing), *(("clouds.ssh", one) for one in lacking_defaults)],
            target,
        )
    for source, name in copies_of(missing).items():
        _copy(shell, Path(source).expanduser(), f"{facts.home}/files/{name}")
    for source in lacking_defaults:
        _copy(shell, Path(source).expanduser(), source.removeprefix("~/"))
    if rewritten.encode() != known:
        shell.put(path, rewritten.encode())
        report(f"copied config.yaml to {target.host}")
    rented = [name for name in ("aws", "gcp", "azure", "lambda", "kubernetes") if name in config.enabled]
    if rented:
        report(
            f"the controller there uses the credentials of {target.host} for {', '.join(rented)}; none were copied"
        )
    return rewritten.encode()


def _insist_on_none(missing: list[tuple[str, str]], target: DeployTarget) -> None:
    if missing:
        listed = "; ".join(f"{key}: {path}" for key, path in missing)
        raise WrongUsage(
            f"config.yaml names files that {target.host} does not have ({listed}); put them there, or copy them with --copy-files, "
            "private keys too"
        )


def _uses_default_known_hosts(config: Config) -> bool:
    section = config.clouds.get("ssh")
    default = Path(_DEFAULT_KNOWN_HOSTS).expanduser()
    hosts = () if section is None else load_pools(getattr(section, "pools", {})).hosts
    return any(host.access.host_key is None and host.access.known_hosts == default for host in hosts)


def _copy(shell: HostConnection, source: Path, path: str) -> None:
    try:
        content = source.read_bytes()
    except OSError as error:
        raise WrongUsage(f"--copy-files: {source} cannot be read: {error.strerror}") from None
    shell.put(path, content)


KEYS = frozenset(
    [
        "certfile",
        "certificate_file",
        "identity_file",
        "keyfile",
        "known_hosts",
        "kubeconfig",
        "passphrase_file",
        "secret_file",
        "webhook_file",
    ]
)


class NamedFile(NamedTuple):
    """`key` is the path of the key in config.yaml, `start` and `end` where the value is in its text."""

    key: str
    path: str
    start: int
    end: int


def named_files(text: str) -> list[NamedFile]:
    """Return every file that a configuration names, in its order."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return [] if root is None else list(_of(root, ""))


def _of(node: yaml.Node, key: str) -> Iterator[NamedFile]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            below = f"{key}.{name.value}" if key else str(name.value)
            if isinstance(value, yaml.ScalarNode) and name.value in KEYS and value.tag.endswith(":str"):
                yield NamedFile(below, value.value, value.start_mark.index, value.end_mark.index)
            else:
                yield from _of(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _of(value, f"{key}[{place}]")


def copies_of(files: list[NamedFile]) -> dict[str, str]:
    """Return the name that each path gets in a folder for copies."""
    return {
        one.path: f"{hashlib.sha256(one.path.encode()).hexdigest()[:8]}-{Path(one.path).name}"
        for one in files
    }


def with_paths(text: str, files: list[NamedFile], folder: str) -> str:
    """Return the configuration with the paths of the copies in `folder`."""
    names = copies_of(files)
    for one in sorted(files, key=lambda one: one.start, reverse=True):
        text = text[: one.start] + json.dumps(f"{folder}/{names[one.path]}") + text[one.end :]
    return text
