"""`python -m lb`: one load balancer agent, alone or under a controller.

Alone, `--target` lists what to balance over. Under a controller the table is pushed to the admin port. Standard
output carries one line of JSON when the ports listen: {"host", "port", "admin_port", "pid"}; talk goes to
standard error. Exit code 0 after SIGTERM, 1 if it cannot run, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # what is imported stays, so to collect meanwhile is a tenth of the start for nothing; `lb.agent.server` enables it

import uvloop

from lb.agent.agent import FROM_ARGUMENTS
from lb.agent.limits_file import shared_path
from lb.agent.server import serve
from lb.agent.server_options import ServerOptions
from lb.config import file as config_file
from lb.config.cors import Cors
from lb.config.decode import network_problem
from lb.config.options import Access, Continuation, Continue, Pushing, PushMode, Retries
from lb.config.schema import Limits, Table, Target, WireError, url_problem
from lb.config.workers import AUTO, MOST_WORKERS
from policies.routing.names import DEFAULT_POLICY
from policies.routing.registry import POLICIES

TOKEN_VARIABLE = "SKYSERVE_LB_TOKEN"  # noqa: S105 (a name, not a token)

_log = logging.getLogger("lb.main")


class _UsageError(Exception):
    """Arguments that cannot be served; the text is the message."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(
        level=given.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        options = _options(given)
    except _UsageError as error:
        parser.error(str(error))
    try:
        uvloop.run(serve(options, announce=lambda line: print(line, flush=True)))
    except OSError as error:  # ssl.SSLError among them
        print(f"lb: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    plain = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m lb", description="A load balancer agent.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address of the data port, unless the table has one (default: %(default)s)",
    )
    add("--port", type=_port, default=8000, help="data port, 0 for any (default: %(default)s)")
    add("--service", default="default", help="name of the service; tables of others are refused")
    add("--region", default="", help="region this agent stands in, for metrics")
    add("--policy", choices=sorted(POLICIES), default=DEFAULT_POLICY, help="(default: %(default)s)")
    add("--target", action="append", default=[], metavar="URL", help="a backend; repeat for more")
    add(
        "--health-path",
        default="/",
        help="probed on a silent --target (default: %(default)s)",
    )
    add("--admin-host", default="127.0.0.1", help="address of the admin port (default: %(default)s)")
    add("--admin-port", type=_port, help="admin port, 0 for any (default: any, if there is a token)")
    add(
        "--admin-token-file",
        type=Path,
        help=f"file with the admin token; else ${TOKEN_VARIABLE}, which stays readable in /proc for this user",
    )
    add(
        "--open-probes",
        action="store_true",
        help="/-/live and /-/ready of the admin port need no token, for the probes of Kubernetes",
    )
    add("--table-file", type=Path, help="keep the last pushed table here; it goes before --target")
    add(
        "--limits-file",
        type=Path,
        help="share the limits of API keys with the agents of this host that name the same file (default: the port's "
        "with --reuse-port, else one beside the table file or the handover socket)",
    )
    add(
        "--usage-file",
        type=Path,
        help="keep what requests of API keys have used here, by day (default: as for --limits-file)",
    )
    add("--traffic-file", type=Path, help="touch this file while requests are served, if its folder is there")
    add("--ready-file", type=Path, help="write the line of standard output here as well")
    add("--time-to-first-byte", type=_seconds, default=plain.time_to_first_byte_s, metavar="SECONDS")
    add("--idle-timeout", type=_seconds, default=plain.idle_timeout_s, metavar="SECONDS")
    add("--connect-timeout", type=_seconds, default=plain.connect_timeout_s, metavar="SECONDS")
    add("--hold", type=_seconds_or_zero, default=plain.hold_s, metavar="SECONDS")
    add("--max-attempts", type=_attempts, default=1 + Retries().max_total_retries, metavar="N")
    add("--pushing", choices=[one.value for one in PushMode], default=Pushing().mode.value)
    add("--push-cap", type=_count, default=Pushing().cap, metavar="N", help="for --pushing fixed_cap")
    add(
        "--continue",
        dest="continue_",
        choices=[one.value for one in Continue],
        default=Continue.AUTO.value,
        help="what becomes of a stream whose target fails (default: %(default)s)",
    )
    add(
        "--allow-policy-override",
        action="store_true",
        help="requests may name their routing policy (X-SkyServe-Policy); each one that was named costs CPU for every request",
    )
    add(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call: https://example.com, https://*.example.com or *; repeat for more",
    )
    add(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="NETWORK",
        help="pass on what a proxy at this address (10.0.0.0/8) reports of its clients; repeat for more",
    )
    add("--shutdown-grace", type=_seconds_or_zero, default=120.0, metavar="SECONDS")
    add("--reuse-port", action="store_true", help="share the data port with other agents on this host")
    add("--targets-cafile", type=Path, help="certificate authority of targets addressed by https")
    add(
        "--handover-socket",
        type=Path,
        metavar="PATH",
        help="take the ports of the agent that offers them here, and offer them to the next",
    )
    add(
        "--workers",
        type=_workers,
        default=AUTO,
        metavar="N|auto",
        help="cores that move the chunks of streams: auto (default) is one per core, up to 16; requests are decided on one",
    )
    add("--no-pump", action="store_true", help="move chunks by Python even where the helper in C is there")
    add("--access-log", action="store_true", help="one line of JSON per request on standard error")
    add("--tls-certfile", type=Path, help="serve https with this certificate chain")
    add("--tls-keyfile", type=Path, help="its key, unless it is in the same file")
    add("--peers-port", type=_port, default=0, help="port for agents of other regions (default: any)")
    add("--peers-certfile", type=Path, help="key and certificate of this agent, for agents of other regions")
    add("--peers-cafile", type=Path, help="certificate of the authority of the service's agents")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _options(given: argparse.Namespace) -> ServerOptions:
    token = _token(given.admin_token_file)
    if given.admin_port is not None and not token:
        raise _UsageError(f"--admin-port needs a token: --admin-token-file or ${TOKEN_VARIABLE}")
    if given.tls_keyfile and not given.tls_certfile:
        raise _UsageError("--tls-keyfile needs --tls-certfile")
    if not given.service:
        raise _UsageError("--service must not be empty")
    if (given.peers_certfile is None) != (given.peers_cafile is None):
        raise _UsageError("--peers-certfile and --peers-cafile go together")
    own_files = (given.tls_certfile, given.tls_keyfile, given.targets_cafile)
    for file in (*own_files, given.peers_certfile, given.peers_cafile):
        if file is not None and not file.is_file():
            raise _UsageError(f"there is no file {file}")
    for file in (
        given.table_file,
        given.ready_file,
        given.handover_socket,
        given.limits_file,
        given.usage_file,
    ):
        if file is not None and not file.absolute().parent.is_dir():
            raise _UsageError(f"there is no folder {file.absolute().parent}")
    return ServerOptions(
        table=_stored_table(given) or _table(given),
        host=given.host,
        port=given.port,
        region=given.region,
        admin_host=given.admin_host,
        admin_port=given.admin_port or 0,
        admin_token=token,
        open_probes=given.open_probes,
        table_file=given.table_file,
        ready_file=given.ready_file,
        tls_certfile=given.tls_certfile,
        tls_keyfile=given.tls_keyfile,
        shutdown_grace_s=given.shutdown_grace,
        reuse_port=given.reuse_port,
        access_log=given.access_log,
        fast_path=not given.no_pump,
        workers=given.workers,
        handover_socket=given.handover_socket,
        limits_file=_shared_file(given, "limits", given.limits_file),
        usage_file=_shared_file(given, "usage", given.usage_file),
        traffic_file=given.traffic_file,
        targets_cafile=given.targets_cafile,
        peers_port=given.peers_port,
        peers_certfile=given.peers_certfile,
        peers_cafile=given.peers_cafile,
    )


def _shared_file(given: argparse.Namespace, kind: str, named: Path | None) -> Path | None:
    """Return the file of a kind that all agents have in common which serve one port, at once or one after the other.

    None if no other agent can be recognized by its arguments. `named` is the one that the arguments name.
    """
    if named is not None:
        return named
    if given.reuse_port and given.port:
        return shared_path(given.service, given.port).with_suffix(f".{kind}")
    neighbour: Path | None = given.table_file or given.handover_socket
    return None if neighbour is None else neighbour.with_name(f"{neighbour.name}.{kind}")


def _table(given: argparse.Namespace) -> Table:
    """Return the table of the arguments, in force until one is pushed."""
    if not given.health_path.startswith("/"):
        raise _UsageError("--health-path must start with '/'")
    for url in given.target:
        problem = url_problem(url)
        if problem is not None:
            raise _UsageError(f"--target {url!r} {problem}")
        if given.target.count(url) > 1:
            raise _UsageError(f"--target {url!r} is given twice")
    return Table(
        service=given.service,
        revision=FROM_ARGUMENTS,
        targets=tuple(Target(id=url, url=url, health_path=given.health_path) for url in given.target),
        policy=given.policy,
        limits=Limits(
            time_to_first_byte_s=given.time_to_first_byte,
            idle_timeout_s=given.idle_timeout,
            connect_timeout_s=given.connect_timeout,
            hold_s=given.hold,
        ),
        retries=Retries(max_total_retries=given.max_attempts - 1),
        pushing=Pushing(mode=PushMode(given.pushing), cap=given.push_cap),
        continuation=Continuation(mode=Continue(given.continue_)),
        access=Access(overrides=given.allow_policy_override),
        cors=_cors(given.cors),
        trusted_proxies=_networks(given.trusted_proxy),
    )


def _networks(texts: Sequence[str]) -> tuple[str, ...]:
    for text in texts:
        problem = network_problem(text)
        if problem is not None:
            raise _UsageError(f"--trusted-proxy {text!r}: {problem}")
    return tuple(texts)


def _cors(origins: Sequence[str]) -> Cors:
    try:
        return Cors.from_json({"origins": list(origins)}, "--cors")
    except WireError as error:
        raise _UsageError(str(error)) from None


def _stored_table(given: argparse.Namespace) -> Table | None:
    """Return the last table, unless it is unusable: then a warning, since an agent that does not start helps no one."""
    if given.table_file is None:
        return None
    try:
        table = config_file.load(given.table_file)
    except (OSError, ValueError) as error:
        _log.warning("ignore table_file=%s why=%r", given.table_file, str(error))
        return None
    if table is None:
        return None
    if table.service != given.service or table.policy not in POLICIES:
        why = f"service {table.service!r}, policy {table.policy!r}"
        _log.warning("ignore table_file=%s why=%r", given.table_file, why)
        return None
    _log.info("start with table_file=%s revision=%s", given.table_file, table.revision)
    return table


def _token(file: Path | None) -> str | None:
    """From the file, else from the environment; never from an argument, which every user of the host can see."""
    if file is None:
        return os.environ.pop(TOKEN_VARIABLE, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _UsageError(f"--admin-token-file {file} cannot be read: {error}") from error
    if not token:
        raise _UsageError(f"--admin-token-file {file} is empty")
    return token


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return port


def _workers(text: str) -> int:
    workers = int(text) if text.isascii() and text.isdigit() else 0
    if text != "auto" and not 1 <= workers <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 1 to {MOST_WORKERS}")
    return workers or AUTO


def _attempts(text: str) -> int:
    attempts = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= attempts <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100")
    return attempts


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= count <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100000")
    return count


def _number(text: str, allowed: Callable[[float], bool]) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and allowed(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of seconds")
    return seconds


def _seconds(text: str) -> float:
    return _number(text, lambda seconds: seconds > 0)


def _seconds_or_zero(text: str) -> float:
    return _number(text, lambda seconds: seconds >= 0)


if __name__ == "__main__":
    sys.exit(main())
