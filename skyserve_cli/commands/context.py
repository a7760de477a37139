"""`serve context`: which controller the commands call."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.commands.options import Format, OutputFormat, home
from skyserve_cli.controller.api.remote import LOCAL, Contexts, Remote, checked
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put_json
from skyserve_cli.text_tables import FittedTable, put_table

app = typer.Typer(no_args_is_help=True, help="Choose which controller the commands call.")


def _known(incomplete: str) -> list[str]:
    return [name for name in (LOCAL, *Contexts.of(home()).remotes) if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the context.", show_default=False, autocompletion=_known),
]


@app.command()
def add(
    name: Name,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="https://HOST:PORT of the controller, ssh://[USER@]HOST[:PORT] of its host, or kubernetes://CONTEXT/NAMESPACE.",
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="https: file with the token; - reads standard input."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", metavar="FILE", help="https: certificates to trust. Default: those of the system."
        ),
    ] = None,
    there: Annotated[
        str | None,
        typer.Option(
            "--home", metavar="PATH", help="ssh: home of the controller there. Default: ~/.skyserve."
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity",
            metavar="FILE",
            help="ssh: private key. Default: those of the SSH agent, or else your own in ~/.ssh.",
        ),
    ] = None,
    known_hosts: Annotated[
        Path | None,
        typer.Option(
            "--known-hosts",
            metavar="FILE",
            help="ssh: file with the host's key; no other is accepted. Default: ~/.ssh/known_hosts.",
        ),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="kubernetes: file with the context. Default: $KUBECONFIG, then ~/.kube/config.",
        ),
    ] = None,
) -> None:
    """Remember a controller on another host, or replace what is known of it.

    Over https its calls carry a token, which is stored in the home. Over ssh they go to the socket in the controller's home, and
    the caller is the owner: nothing secret is stored here. So it is in Kubernetes, for who may run commands in the controller's Pod.

    \b
    serve context add prod https://controller.example.com:9443 --token-file ada.token
    serve context add prod ssh://ubuntu@controller.example.com
    serve context add prod kubernetes://my-cluster/serving
    """
    if name == LOCAL:
        raise WrongUsage(f"{LOCAL} is the controller of this home; choose another name")
    _insist_on_options(
        url,
        {
            "https": {"--token-file": token_file, "--ca": ca},
            "ssh": {"--home": there, "--identity": identity, "--known-hosts": known_hosts},
            "kubernetes": {"--kubeconfig": kubeconfig},
        },
    )
    paths = {"--ca": ca, "--identity": identity, "--known-hosts": known_hosts, "--kubeconfig": kubeconfig}
    for option, path in paths.items():
        if path is not None and not path.expanduser().is_file():
            raise WrongUsage(f"{option}: there is no file {path}")
    remote = Remote(
        url.rstrip("/"),
        "" if token_file is None else _read(token_file),
        _absolute(ca),
        there or "",
        _absolute(identity),
        _absolute(known_hosts),
        kubeconfig=_absolute(kubeconfig),
    )
    contexts = Contexts.of(home())
    remotes = {**contexts.remotes, name: checked(remote, "URL")}
    contexts._replace(remotes=remotes).write(home())
    inform(f"added {name}; `serve context use {name}` lets the commands call it")


def _insist_on_options(url: str, options: Mapping[str, Mapping[str, object]]) -> None:
    """Raise WrongUsage for an option that goes with another kind of URL, and where the token is missing.

    `options` are the values of options by the kind of URL that they are for.
    """
    kind = next((kind for kind in options if url.startswith(f"{kind}://")), "https")
    for other, values in options.items():
        wrong = [option for option, value in values.items() if value is not None]
        if other != kind and wrong:
            raise WrongUsage(f"{', '.join(wrong)}: is for {other}:// and not for {kind}://")
    if kind == "https" and options[kind]["--token-file"] is None:
        raise WrongUsage("--token-file: name the file with the token, which https:// needs")


def _read(token_file: Path) -> str:
    try:
        content = sys.stdin.read() if str(token_file) == "-" else token_file.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(f"--token-file: {token_file} cannot be read: {error}") from None
    return content.strip()


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.expanduser().absolute())


@app.command()
def use(name: Name) -> None:
    """Let the commands call this controller from now on; `local` is that of this home."""
    contexts = Contexts.of(home())
    _insist(contexts, name)
    contexts._replace(current=name).write(home())
    inform(
        f"the commands call {contexts.remotes[name].url if name != LOCAL else 'the controller of this home'}"
    )


@app.command()
def remove(name: Name) -> None:
    """Forget a controller and its token."""
    contexts = Contexts.of(home())
    if name == LOCAL:
        raise CommandFailed(f"{LOCAL} is the controller of this home and cannot be removed", code=2)
    _insist(contexts, name)
    remotes = {key: remote for key, remote in contexts.remotes.items() if key != name}
    Contexts(LOCAL if contexts.current == name else contexts.current, remotes).write(home())
    inform(f"removed {name}")


@app.command("list")
def list_(output: Format = OutputFormat.TABLE) -> None:
    """Show the controllers that the commands can call. The one in use has a *."""
    contexts = Contexts.of(home())
    places = {LOCAL: str(home().root), **{name: remote.url for name, remote in contexts.remotes.items()}}
    if output is OutputFormat.JSON:
        rows = [
            {"name": name, "where": where, "current": name == contexts.current}
            for name, where in places.items()
        ]
        put_json(rows)
        return
    marked = [("*" if name == contexts.current else "", name, where) for name, where in places.items()]
    put_table(FittedTable(("", "NAME", "WHERE"), marked))


def _insist(contexts: Contexts, name: str) -> None:
    if name != LOCAL and name not in contexts.remotes:
        known = ", ".join((LOCAL, *contexts.remotes))
        raise CommandFailed(f"there is no context {name} (known: {known})", code=2)
