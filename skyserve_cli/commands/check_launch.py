"""`serve check --launch`: a machine in each cloud, from its launch to its end, and what that cost."""

from __future__ import annotations

import fcntl
import http.client
import json
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from policies.model import Offer
from provisioners.clock import unix_now
from provisioners.port.accelerator_names import canonical
from provisioners.port.base import Candidate, Requirements
from provisioners.port.errors import ProvisionError
from provisioners.remote.certificates import Authority
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import OutputFormat, View
from skyserve_cli.config import ConfigError
from skyserve_cli.config_clouds import RentedConfig
from skyserve_cli.home import Home, write_private
from skyserve_cli.launch_check import CheckReport, Fetch, LaunchCheck
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put_json, span
from skyserve_cli.text_tables import FittedTable, doing, put_table

_MINUTES = 15  # of a check that goes well, at most
_FETCH_S = 10.0
_MOST_BYTES = 65_536


def launch(
    clouds: Clouds,
    here: Home,
    names: Sequence[str],
    accelerator: str | None,
    *,
    use_spot: bool,
    yes: bool,
    output: OutputFormat,
) -> None:
    """Launch and end a machine in each of the clouds."""
    rented = [name for name in names if isinstance(clouds.config.clouds[name], RentedConfig)]
    if not rented:
        raise WrongUsage("--launch needs an enabled cloud that rents machines")
    with _alone(here):
        _launch(clouds, here, rented, _need(accelerator, use_spot=use_spot), yes=yes, output=output)


def _launch(
    clouds: Clouds, here: Home, rented: Sequence[str], need: Requirements, *, yes: bool, output: OutputFormat
) -> None:
    _remove_earlier(clouds, here)
    choices = {name: _offers(clouds, name, need) for name in rented}
    for name, offers in choices.items():
        what = _described(offers[0]) if offers else "no such machine is offered"
        inform(f"{name}: {what}")
    total = sum(offers[0].price_usd_hour for offers in choices.values() if offers)
    if not total:
        raise CommandFailed("nothing can be launched")
    confirm(
        f"Launch, for up to {_MINUTES} minutes each, about ${total * _MINUTES / 60:.2f} in all?",
        yes=yes,
    )
    reports = [_checked(clouds, here, name, offers) for name, offers in choices.items() if offers]
    if output is OutputFormat.JSON:
        put_json([_view(report) for report in reports])
    else:
        _show(reports)
    failed = [report.cloud for report in reports if not report.ok]
    failed += [name for name, offers in choices.items() if not offers]
    if failed:
        raise CommandFailed(f"not every cloud can be used: {', '.join(failed)}")


def _need(accelerator: str | None, *, use_spot: bool) -> Requirements:
    if accelerator is None:
        return Requirements((Candidate(use_spot=use_spot),))
    name, colon, count = accelerator.partition(":")
    try:
        number = float(count) if colon else 1.0
    except ValueError:
        raise WrongUsage(f"--accelerator takes a name and a count, like L4:4 (got {accelerator!r})") from None
    return Requirements(
        (Candidate(accelerator=canonical(name), accelerator_count=number, use_spot=use_spot),)
    )


def _offers(clouds: Clouds, name: str, need: Requirements) -> Sequence[Offer]:
    """Return one per zone, cheapest first."""
    try:
        cloud = clouds.get(name)
        return cloud.offers(need) if isinstance(cloud, VmProvisioner) else ()
    except (ProvisionError, ConfigError) as error:
        inform(f"{name}: {error}")
        return ()


def _checked(clouds: Clouds, here: Home, name: str, offers: Sequence[Offer]) -> CheckReport:
    owner = secrets.token_hex(4)
    cloud = clouds.get(name)
    assert isinstance(cloud, VmProvisioner)  # noqa: S101 (only those have offers here)
    _note(here, {**_noted(here), owner: name})
    fetch = fetch_with(here.machine_secret(), owner)
    with doing(f"{name}: launching") as show:
        line = show if sys.stderr.isatty() else inform  # a log has a line for each step
        check = LaunchCheck(
            cloud,
            owner,
            fetch,
            now=unix_now,
            sleep=time.sleep,
            on_step=lambda sentence: line(f"{name}: {sentence}"),
        )
        report = check.run(offers)
    if not report.left:
        _note(here, {known: at for known, at in _noted(here).items() if known != owner})
    return report


def fetch_with(secret: bytes, owner: str) -> Fetch:
    """GET of a page of a machine, whose certificate must be the one that follows from the home's secret."""

    def fetch(endpoint: str, token: str) -> str:
        url = urlsplit(endpoint)
        sock = socket.create_connection((url.hostname or "", url.port or 80), timeout=_FETCH_S)
        try:
            if url.scheme == "https":
                context = ssl.create_default_context(cadata=Authority(secret, owner).certificate)
                sock = context.wrap_socket(sock, server_hostname=token)
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_FETCH_S)
            connection.sock = sock
            connection.request("GET", "/")
            return connection.getresponse().read(_MOST_BYTES).decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            sock.close()

    return fetch


# --- what a killed check has left --------------------------------------------------------------------------------------


def _remove_earlier(clouds: Clouds, here: Home) -> None:
    for owner, name in _noted(here).items():
        inform(f"{name}: removing what an interrupted check has left (owner {owner})")
        cloud = clouds.get(name)
        left: tuple[str, ...] = ()
        if isinstance(cloud, VmProvisioner):
            left = LaunchCheck(cloud, owner, _no_fetch, now=unix_now, sleep=time.sleep).remove()
        if left:
            raise CommandFailed(
                f"{name} still has {'; '.join(left)} of an interrupted check: "
                f"`serve gc --any-owner --owner {owner}` removes it"
            )
        _note(here, {known: at for known, at in _noted(here).items() if known != owner})


def _no_fetch(endpoint: str, token: str) -> str:
    raise OSError("nothing is fetched")


def _noted(here: Home) -> Mapping[str, str]:
    """Return the clouds of checks that are not over, by owner."""
    try:
        found = json.loads(here.check_launches.read_text())
        return {str(owner): str(name) for owner, name in found.items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def _note(here: Home, owners: Mapping[str, str]) -> None:
    write_private(here.check_launches, json.dumps(owners).encode())


@contextmanager
def _alone(here: Home) -> Iterator[None]:
    """Another check of this home would remove what this one has launched."""
    with here.check_launches_lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(
                "another `serve check --launch` of this home is at work; wait for its end"
            ) from None
        yield


# --- how it looks ------------------------------------------------------------------------------------------------------


def _described(offer: Offer) -> str:
    market = offer.capacity_type.value.replace("_", "-")
    return f"{market} {offer.instance_type} in {offer.zone.label} at {offer.price_usd_hour:g} USD per hour"


def _show(reports: Sequence[CheckReport]) -> None:
    rows = [
        (report.cloud, step.what, "failed" if step.problem else "ok", span(step.seconds), step.problem)
        for report in reports
        for step in report.steps
    ]
    put_table(FittedTable(("CLOUD", "STEP", "RESULT", "TIME", "WHY"), rows))
    for report in reports:
        if report.offer is not None:
            inform(f"{report.cloud}: {_described(report.offer)}: about ${report.usd:.4f}")
        for sentence in report.left:
            inform(f"{report.cloud}: left behind: {sentence}")


def _view(report: CheckReport) -> View:
    offer = report.offer
    return {
        "cloud": report.cloud,
        "ok": report.ok,
        "zone": None if offer is None else offer.zone.name,
        "instance_type": None if offer is None else offer.instance_type,
        "capacity_type": None if offer is None else offer.capacity_type.value,
        "usd_hour": None if offer is None else offer.price_usd_hour,
        "usd": report.usd,
        "steps": [
            {"what": step.what, "ok": not step.problem, "seconds": step.seconds, "problem": step.problem}
            for step in report.steps
        ],
        "left": list(report.left),
    }
