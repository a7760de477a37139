"""`serve token`: who else may call the controller."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from skyserve_cli.commands.options import Format, OutputFormat, complete_service, controller
from skyserve_cli.output import CommandFailed, date_time, inform, plural, put, put_json
from skyserve_cli.text_tables import FittedTable, put_table

app = typer.Typer(
    no_args_is_help=True, help="Give others access to the controller: tokens with a role and services."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.", show_default=False)]


class RoleName(str, Enum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


@app.command()
def create(
    name: Name,
    role: Annotated[
        RoleName,
        typer.Option(
            "--role", help="viewer reads; operator also starts, updates and ends; admin may do everything."
        ),
    ] = RoleName.VIEWER,
    service: Annotated[
        list[str] | None,
        typer.Option(
            "--service",
            metavar="NAME",
            help="A service that it covers, up or not yet; may be given several times. Default: all.",
            autocompletion=complete_service,
        ),
    ] = None,
    team: Annotated[
        str | None,
        typer.Option(
            "--team",
            metavar="TEAM",
            help="Team of config.yaml whose quota the services it starts use. Default: none.",
        ),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Create a token and print it. It cannot be printed again: only its SHA-256 is stored."""
    if service and role is RoleName.ADMIN:
        raise CommandFailed(
            "--service: an admin covers all services; leave it out, or use --role operator", code=2
        )
    token = controller().create_token(name, role.value, service or None, team or "")
    if output is OutputFormat.JSON:
        put_json(
            {"name": name, "role": role.value, "services": service or None, "team": team, "token": token}
        )
        return
    covered = "all services" if not service else plural(len(set(service)), "service")
    inform(f"{name} is {role.value} of {covered}; the token is shown this once:")
    put(token)


@app.command("list")
def list_(output: Format = OutputFormat.TABLE) -> None:
    """Show the tokens, also the revoked ones."""
    found = controller().tokens()
    if output is OutputFormat.JSON:
        put_json(found)
        return
    rows = [
        (
            each["name"],
            each["role"],
            "all" if each["services"] is None else ", ".join(each["services"]),
            each.get("team") or "-",  # a controller of an earlier release sends none
            date_time(each["created_at"]),
            each["created_by"],
            "valid" if each["revoked_at"] is None else f"revoked {date_time(each['revoked_at'])}",
        )
        for each in found
    ]
    put_table(FittedTable(("NAME", "ROLE", "SERVICES", "TEAM", "CREATED", "BY", "STATE"), rows))


@app.command()
def revoke(name: Name) -> None:
    """Revoke a token: the next call with it is rejected."""
    controller().revoke_token(name)
    inform(f"the token {name} is revoked")
