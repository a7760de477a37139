"""`serve profile`: what one replica carries within an SLO, measured with requests of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from lb.config.options import Slo
from skyserve_cli.commands import files, profile_text
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import Format, OutputFormat, Yes, controller, find
from skyserve_cli.commands.statistics import insist_on_statistics
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put, put_json
from skyserve_cli.profile import prompts
from skyserve_cli.profile.measure import Limits, Measured, Measurement
from skyserve_cli.profile.server import ServerError, connected
from skyserve_cli.profile.weights import Carried, ResultError, carried_of
from skyserve_cli.text_tables import doing, put_table

INTERRUPTED = 130
ATTAINMENT = 0.99
MOST_IN_FLIGHT = 512


class Target(NamedTuple):
    """Where requests go, when they are late, and how many replicas are ready. `file` None: it was given as a URL."""

    url: str
    slo: Slo
    attainment: float
    replicas: Callable[[], Awaitable[int]]
    file: Path | None
    first: float | None


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="The file of a service that is up, or the URL of an OpenAI-compatible server.",
            show_default=False,
        ),
    ],
    ttft_ms: Annotated[
        float | None,
        typer.Option("--ttft-ms", min=1, help="Late if the first byte takes longer. Default: the file's."),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            "--tpot-ms",
            min=0.1,
            help="Late if a further token takes longer on the mean. Default: the file's.",
        ),
    ] = None,
    attainment: Annotated[
        str | None,
        typer.Option(
            "--attainment", metavar="SHARE", help="Share of requests in time. Default: the file's, or 99%."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, max=1_000_000, help="Mean length of prompts.")
    ] = 500,
    response_tokens: Annotated[
        int, typer.Option("--response-tokens", min=2, max=1_000_000, help="Mean length of responses.")
    ] = 200,
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths",
            metavar="CSV",
            help="Lengths of real requests instead: prompt_tokens,response_tokens.",
        ),
    ] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="RESULT.json",
            help="Result (-o json) of a run with other lengths on such a replica, for slo.response_weight. Can be repeated.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to request. Default: the first that is listed.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with the API key to send.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, help="Of a URL: replicas behind it. Default: 1."),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            "--start",
            metavar="RATE",
            help="First load, requests per second and replica. Default: by one request.",
        ),
    ] = None,
    step: Annotated[str, typer.Option("--step", metavar="DURATION", help="Length of a step.")] = "30s",
    max_time: Annotated[
        str, typer.Option("--max-time", metavar="DURATION", help="No step begins that would end later.")
    ] = "10m",
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Requests in all, at most.")
    ] = 5000,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and words.")] = 0,
    yes: Yes = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Measure how many requests per second one replica serves within an SLO.

    Sends requests at rising rates: whether the server keeps up or not, they come at random instants with that mean rate. The rate is
    doubled until too many requests are late, and then narrowed down. The result is an estimate and a 90 % interval, for
    slo.capacity_qps in the service file, without which a service learns its capacity while it serves.

    This puts the server over its SLO on purpose. Of a service that is up, the requests count as demand: it may scale up meanwhile.
    Steps in which its number of ready replicas changes are left out. Ctrl-C ends it and prints the results so far.

    \b
    serve profile service.yaml
    serve profile http://127.0.0.1:8000 --ttft-ms 1000 --tpot-ms 50
    serve profile service.yaml --prompt-tokens 2000 --response-tokens 50 -o json > long.json
    serve profile service.yaml --prompt-tokens 200 --response-tokens 400 --with long.json
    """
    insist_on_statistics("serve profile")
    limits = Limits(
        _positive("--max-time", max_time), max_requests, _positive("--step", step), MOST_IN_FLIGHT
    )
    if start is not None and not 0 < start <= 1e5:
        raise WrongUsage(f"--start takes requests per second above 0 (got {start:g})")
    where = _target(target, ttft_ms, tpot_ms, attainment, replicas, start)
    before = _results(others or [])
    key = None if api_key_file is None else _secret(api_key_file)
    rng = random.Random(seed)
    try:
        shapes = (
            prompts.drawn(rng, prompt_tokens, response_tokens)
            if lengths is None
            else prompts.recorded(rng, lengths)
        )
    except prompts.LengthsError as error:
        raise WrongUsage(f"--lengths: {error}") from None
    confirm(
        f"Send up to {max_requests} requests to {where.url}, more than it can serve in time?",
        yes=yes,
    )
    measured = _measured(where, model, key, shapes, limits, rng)
    if output is OutputFormat.JSON:
        put_json(profile_text.view(measured, before))
    elif measured.steps:
        put_table(profile_text.steps_table(measured))
        put(profile_text.sentence(measured, where.file, before))
    if measured.stopped == "interrupted":
        raise CommandFailed("interrupted", INTERRUPTED)
    if measured.found is None:
        raise CommandFailed(profile_text.why_nothing(measured))


def _results(paths: list[Path]) -> list[Carried]:
    """Raise WrongUsage."""
    try:
        return [carried_of(path) for path in paths]
    except ResultError as error:
        raise WrongUsage(f"--with: {error}") from None


def _target(
    text: str,
    ttft_ms: float | None,
    tpot_ms: float | None,
    attainment: str | None,
    replicas: int | None,
    start: float | None,
) -> Target:
    """Return what the argument and the options mean. Raises WrongUsage, and as `_running`."""
    asked = None if attainment is None else _share(attainment)
    if text.startswith(("http://", "https://")):
        behind = replicas or 1
        return Target(text, _slo(ttft_ms, tpot_ms), asked or ATTAINMENT, lambda: _always(behind), None, start)
    if replicas is not None:
        raise WrongUsage("--replicas is for a URL: the ready replicas of a service are known")
    file = Path(text)
    spec = files.load(file).spec
    if spec.slo is not None:
        ttft_ms = spec.slo.ttft_ms if ttft_ms is None else ttft_ms
        tpot_ms = spec.slo.tpot_ms if tpot_ms is None else tpot_ms
        asked = asked or spec.slo.attainment
    slo = _slo(ttft_ms, tpot_ms)
    name = spec.name

    def ready() -> int:
        return int(find(controller().services(name), name)["ready"])

    view = find(controller().services(name), name)
    if not view["endpoint"] or not view["ready"]:
        raise CommandFailed(
            f"{name} has no ready replica yet: wait for it (serve status {name}), or profile a server by its URL"
        )
    return Target(view["endpoint"], slo, asked or ATTAINMENT, lambda: _at_least_one(ready), file, start)


async def _always(behind: int) -> int:
    return behind


async def _at_least_one(ready: Callable[[], int]) -> int:
    return max(1, await asyncio.to_thread(ready))


def _measured(
    where: Target,
    model: str | None,
    key: str | None,
    shapes: Iterator[prompts.Shape],
    limits: Limits,
    rng: random.Random,
) -> Measurement:
    """Measure; Ctrl-C ends it early. Raises CommandFailed."""
    with doing("sending one request") as show:

        def progress(what: Measured | float) -> None:
            if isinstance(what, Measured):
                inform(profile_text.step_line(what))
            else:
                show(f"sending {what:.3g} requests per second and replica")

        async def run() -> Measurement:
            async with connected(where.url, model, key, rng) as server:
                measurement = Measurement(
                    server,
                    where.slo,
                    where.attainment,
                    shapes,
                    limits,
                    where.replicas,
                    rng,
                    progress,
                    where.first,
                )
                await measurement.run()
                return measurement

        try:
            return asyncio.run(run())
        except ServerError as error:
            raise CommandFailed(str(error)) from None


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    if ttft_ms is None and tpot_ms is None:
        raise WrongUsage(
            "when is a request late? Give --ttft-ms, --tpot-ms or both, or a file with replica_policy.slo"
        )
    return Slo(ttft_s=(ttft_ms or 0.0) / 1000, tpot_s=(tpot_ms or 0.0) / 1000)


def _share(text: str) -> float:
    """Return ``99.5%`` or ``0.995`` as a share."""
    try:
        found = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0.5 <= found < 1:
        raise WrongUsage(f"--attainment takes a share from 50% to below 100%, such as 99.5% (got {text})")
    return found


def _positive(option: str, text: str) -> float:
    found = seconds(option, text)
    if found <= 0:
        raise WrongUsage(f"{option} must be above 0 (got {text})")
    return found


def _secret(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(f"--api-key-file: cannot read {path}: {error}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise WrongUsage(f"--api-key-file: {path} has no key on one line")
    return key
