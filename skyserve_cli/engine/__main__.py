"""`python -m skyserve_cli.engine --profile l4-8b --port 8000`: the engine for `run:` scripts, quick to start."""

from __future__ import annotations

import argparse
import sys

from skyserve_cli.engine.profiles import PROFILES, UnknownProfile, describe
from skyserve_cli.engine.style import Style


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 served and was stopped, 1 could not listen, 2 wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list_profiles:
        print(describe())
        return 0
    # The server's imports are most of the start-up time: --help and --list-profiles do without.
    from skyserve_cli.engine.cors import WrongOrigin
    from skyserve_cli.engine.server import serve

    try:
        serve(
            options.profile,
            options.host,
            options.port,
            model=options.model,
            speed=options.speed,
            seed=options.seed,
            mean_output_tokens=options.mean_output_tokens,
            cold_start_s=options.cold_start,
            cors_origins=options.cors,
            cache_events=options.cache_events,
            style=Style(options.trim_messages, options.hold_text, options.tokens_per_event),
        )
    except UnknownProfile as error:
        parser.error(str(error))
    except WrongOrigin as error:
        parser.error(f"--cors: {error}")
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyserve_cli.engine",
        description="An OpenAI-compatible server that takes the time of an LLM engine, without a GPU.",
    )
    parser.add_argument("--profile", default="l4-8b", help=f"{', '.join(PROFILES)} (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--model", help="name that clients ask for (default: the profile's)")
    parser.add_argument("--speed", type=_positive, default=1.0, help="divides all durations (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="engines with equal seeds say the same")
    parser.add_argument(
        "--mean-output-tokens", type=_positive, default=200.0, help="length of responses without a limit"
    )
    parser.add_argument("--cold-start", type=_seconds, default=0.0, help="seconds before the port opens")
    parser.add_argument(
        "--cors", metavar="ORIGIN", action="append", default=[], help="web pages that may call; * allows all"
    )
    parser.add_argument(
        "--trim-messages", action="store_true", help="trim chat messages, as the template of Llama 3 does"
    )
    parser.add_argument(
        "--hold-text", action="store_true", help="hold text back for stop strings as vLLM does"
    )
    parser.add_argument(
        "--tokens-per-event", type=_count, default=1, help="tokens in an event of a stream (default: 1)"
    )
    parser.add_argument(
        "--cache-events",
        action="store_true",
        help="publish what is cached and evicted, as vLLM does, 1,000 ports above",
    )
    parser.add_argument("--list-profiles", action="store_true", help="print every parameter with its source")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 (got {text})")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative (got {text})")
    return value


if __name__ == "__main__":
    sys.exit(main())
