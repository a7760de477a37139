"""The program: which verbs there are, and what an error means to the shell.

Exit codes: 0 done, 1 failed, 2 wrong usage or a wrong file, 4 a database that cannot be used, 124 not done in time, 130
interrupted. Errors are sentences on stderr.

Only the module of the verb in question is imported; the others are here with their one line of help, so that
`serve --help` and a completed `serve st<TAB>` respond at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer

from skyserve_cli import __version__
from skyserve_cli.output import DEADLINE, CommandFailed, inform

SERVICES, STORY, FILES, MACHINERY = "Services", "What happens", "Service files", "Machinery"


class Verb(NamedTuple):
    """`line` is the first line of the verb's own help. A family has verbs of its own (`serve local zones`)."""

    line: str
    panel: str
    family: bool = False


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "up": Verb("Bring a service up: show the plan and its price, confirm, and wait until it is ready.", SERVICES),
        "status": Verb("Show services, their replicas, and what they cost.", SERVICES),
        "update": Verb("Give a running service a new version.", SERVICES),
        "down": Verb("Take services down, and wait until nothing of them is left.", SERVICES),
        "test": Verb("Test a running service with a few requests: models, a chat, a stream, tools, latency.", SERVICES),
        "why": Verb("Say why a service, or one of its replicas, is not well, and what to do about it.", STORY),
        "logs": Verb("Print the logs of replicas, of the load balancer, or of the controller.", STORY),
        "exec": Verb("Run a command where a replica runs.", STORY),
        "ssh": Verb("Open a shell where a replica runs.", STORY),
        "events": Verb("Show the event log: what happened to services and replicas, and why.", STORY),
        "report": Verb("Show how available a service was, on what it ran, and what it cost.", STORY),
        "usage": Verb("Show what the requests of each API key and model have used.", STORY),
        "dashboard": Verb("Open the page that shows services, their replicas, spending and requests over time.", STORY),
        "notify": Verb("Send a test notification to the destinations in config.yaml.", STORY, family=True),
        "init": Verb("Write a service file.", FILES),
        "validate": Verb("Check a service file without launching anything.", FILES),
        "plan": Verb("Show where a service would run and what it would cost, without launching it.", FILES),
        "profile": Verb("Measure how many requests per second one replica serves within an SLO.", FILES),
        "simulate": Verb("Show what a service would have cost on a spot market, and how often it would have been short.", FILES),
        "check": Verb("Check which clouds can be used from here.", MACHINERY),
        "catalog": Verb("List what machines the clouds have, where, and what they cost.", MACHINERY, family=True),
        "gc": Verb("Find orphaned resources in the clouds, and remove them.", MACHINERY),
        "controller": Verb("Start, stop and look at the controller; rotate its keys, back it up and restore it.", MACHINERY, family=True),
        "teams": Verb("Show what each team uses of its quota and its budget.", MACHINERY),
        "token": Verb("Give others access to the controller: tokens with a role and services.", MACHINERY, family=True),
        "context": Verb("Choose which controller the commands call.", MACHINERY, family=True),
        "local": Verb("Play with the local cloud: its zones, its capacity, its spot market.", MACHINERY, family=True),
        "engine": Verb("Run an OpenAI-compatible server that takes an LLM engine's time, without a GPU.", MACHINERY),
    }
)  # fmt: skip

#: Errors a user can do something about, by name: naming one imports nothing. The text is theirs.
EXIT_CODES: Mapping[str, int] = MappingProxyType(
    {
        "skyserve_cli.spec.problems.SpecError": 2,
        "skyserve_cli.config.ConfigError": 2,
        "skyserve_cli.home.HomeError": 2,
        "provisioners.registry.UnknownCloudError": 2,
        "provisioners.port.errors.InvalidRequestError": 2,
        "provisioners.port.errors.ProvisionError": 1,
        "provisioners.offers.catalog.model.CatalogError": 2,
        "skyserve_cli.clouds.CloudNotEnabledError": 1,
        "skyserve_cli.controller.api.client.RefusedError": 1,
        "skyserve_cli.controller.api.remote.RemoteError": 2,
        "skyserve_cli.controller.persistence.opening.UnusableError": 4,
        "skyserve_cli.controller.persistence.opening.CannotOpenError": 1,
        "skyserve_cli.controller.backup.archive.BackupError": 1,
        "skyserve_cli.buckets.port.BadPlaceError": 2,
        "skyserve_cli.buckets.port.BucketError": 1,
        "skyserve_cli.controller.api.client.MisconfiguredError": 2,
        "skyserve_cli.controller.api.client.UnusableDatabaseError": 4,
        "skyserve_cli.controller.api.waiting.DeadlineError": DEADLINE,
        "skyserve_cli.controller.api.client.ControllerDownError": 1,
        "skyserve_cli.controller.api.client.UnreachableError": 1,
    }
)

INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    program = Path(sys.argv[0]).name
    command = typer.main.get_command(build(_verb(arguments)))
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    try:
        command(list(arguments), prog_name=program if program in ("serve", "skyserve") else "serve")
    except CommandFailed as error:
        inform(str(error))
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ending:  # how Typer ends, with 2 after wrong usage
        return ending.code if isinstance(ending.code, int) else 0
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        inform(str(error))
        return code
    return 0


def exit_code(error: Exception) -> int | None:
    """Return the exit code; None for an unexpected error, which keeps its traceback."""
    for kind in type(error).__mro__:
        code = EXIT_CODES.get(f"{kind.__module__}.{kind.__qualname__}")
        if code is not None:
            return code
    return None


def build(whole: str | None) -> typer.Typer:
    """Return the program, with one verb whole and the others as their line of help."""
    root = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Serve AI models on spot and on-demand GPUs of every cloud, behind one endpoint.",
        epilog="Begin with: serve up service.yaml",
    )
    root.callback()(_root)
    for name, verb in VERBS.items():
        if name != whole:
            root.command(name, help=verb.line, rich_help_panel=verb.panel)(_elsewhere)
            continue
        module = import_module(f"skyserve_cli.commands.{name}")
        if verb.family:
            root.add_typer(module.app, name=name, rich_help_panel=verb.panel)
        else:
            root.command(name, rich_help_panel=verb.panel)(getattr(module, name))
    return root


def _verb(arguments: Sequence[str]) -> str | None:
    """Return the verb of this command line, or of the one the shell wants completed."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS")
    words = typed.split()[1:] if typed and not arguments else arguments
    of_options = {index + 1 for index, word in enumerate(words) if word == "--timeout"}
    return next(
        (word for index, word in enumerate(words) if index not in of_options and not word.startswith("-")),
        None,
    )


def _elsewhere() -> None:
    """A verb in a module that is not loaded: `build` got another one."""
    raise AssertionError("build() was asked for another verb")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"serve {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            envvar="SKYSERVE_TIMEOUT",
            help="Wait for the controller no longer than this in all; exit code 124. Default: 30 for each request, and no "
            "limit for what waits for replicas.",
        ),
    ] = None,
) -> None:
    from skyserve_cli.commands.deadline import give_time

    give_time(timeout)
