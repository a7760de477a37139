"""`serve engine`: an LLM engine's behaviour in time, without its GPU. What the examples run."""

from __future__ import annotations

from typing import Annotated

import typer

from skyserve_cli.engine.cors import WrongOrigin
from skyserve_cli.engine.profiles import PROFILES, UnknownProfile, describe
from skyserve_cli.engine.server import serve
from skyserve_cli.engine.style import Style
from skyserve_cli.output import CommandFailed, WrongUsage, put


def engine(
    profile: Annotated[str, typer.Option("--profile", help=", ".join(PROFILES))] = "l4-8b",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    speed: Annotated[float, typer.Option("--speed", help="Speed-up factor over the profile.")] = 1.0,
    model: Annotated[
        str | None, typer.Option("--model", help="What clients ask for. Default: the profile's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Engines with equal seeds say the same.")] = 0,
    mean_output_tokens: Annotated[
        float, typer.Option("--mean-output-tokens", help="Length of responses without a limit.")
    ] = 200.0,
    cold_start: Annotated[
        float, typer.Option("--cold-start", metavar="SECONDS", min=0, help="Before the port opens.")
    ] = 0.0,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Web pages that may call, such as https://example.com; repeatable; * allows all.",
        ),
    ] = None,
    trim_messages: Annotated[
        bool, typer.Option("--trim-messages", help="Trim chat messages, as the template of Llama 3 does.")
    ] = False,
    hold_text: Annotated[
        bool, typer.Option("--hold-text", help="Hold text back for stop strings as vLLM does.")
    ] = False,
    tokens_per_event: Annotated[
        int, typer.Option("--tokens-per-event", min=1, help="Tokens in an event of a stream.")
    ] = 1,
    cache_events: Annotated[
        bool,
        typer.Option(
            "--cache-events",
            help="Publish what is cached and evicted, as vLLM does, on the port 1,000 above; replay it 2,000 above.",
        ),
    ] = False,
    list_profiles: Annotated[
        bool, typer.Option("--list-profiles", help="Print every parameter with its source.")
    ] = False,
) -> None:
    """Run an OpenAI-compatible server that takes an LLM engine's time, without a GPU."""
    if list_profiles:
        put(describe())
        return
    for option, value in (("--speed", speed), ("--mean-output-tokens", mean_output_tokens)):
        if not 0 < value < float("inf"):
            raise WrongUsage(f"{option} must be above 0 (got {value:g})")
    try:
        serve(
            profile,
            host,
            port,
            model=model,
            speed=speed,
            seed=seed,
            mean_output_tokens=mean_output_tokens,
            cold_start_s=cold_start,
            cors_origins=cors or (),
            cache_events=cache_events,
            style=Style(trim_messages, hold_text, tokens_per_event),
        )
    except UnknownProfile as error:
        raise WrongUsage(str(error)) from None
    except WrongOrigin as error:
        raise WrongUsage(f"--cors: {error}") from None
    except OSError as error:
        raise CommandFailed(f"cannot listen on {host}:{port}: {error}") from error
