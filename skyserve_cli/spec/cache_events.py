"""The options by which engines publish their cache events, added to the commands of a service that follows them."""

import re
from collections.abc import Iterator, Sequence

from skyserve_cli.spec.model import ResourceChoice
from skyserve_cli.spec.problems import SpecWarning

KEY = "service.load_balancer.cache_events"
OPTION = "--kv-events-config"
COMPARING = ("cache_aware", "gorgo", "prefix_tree")  # policies that know prompts
WITHOUT_TLS = ("kubernetes", "local", "ssh")

_PORT = "${SKYSERVE_REPLICA_PORT:-8000}"
_PLACES = (
    f'\\"endpoint\\":\\"tcp://*:$(({_PORT}+1000))\\",\\"replay_endpoint\\":\\"tcp://*:$(({_PORT}+2000))\\"'
)
_VLLM = (
    f' {OPTION} "{{\\"enable_kv_cache_events\\":true,\\"publisher\\":\\"zmq\\",{_PLACES}}}"'
    " --enable-prompt-tokens-details"
)
_SGLANG = f' {OPTION} "{{\\"publisher\\":\\"zmq\\",\\"topic\\":\\"\\",{_PLACES}}}" --enable-cache-report'
_OURS = " --cache-events"

# `vllm serve` has the model as its only argument, which has to come before the options.
_COMMANDS = (
    (re.compile(r"\bvllm[ \t]+serve\b(?:(?:[ \t]|\\\n)+(?!-)[^\s\\;&|<>#]+)?"), _VLLM),
    (re.compile(r"\bsglang\.launch_server\b"), _SGLANG),
    (re.compile(r"\b(?:skyserve_cli\.engine|serve[ \t]+engine)\b"), _OURS),
)


def with_options(run: str) -> str:
    """Return the commands with what makes known engines publish their events, unless they say it themselves."""
    if OPTION in run or _OURS in run:
        return run
    for pattern, options in _COMMANDS:
        run = pattern.sub(lambda found, options=options: found[0] + options, run)  # type: ignore[misc]
    return run


def warnings(run: str, policy: str, resources: Sequence[ResourceChoice]) -> Iterator[SpecWarning]:
    """Yield why cache events may have no effect."""
    if OPTION not in run and _OURS not in run:
        message = (
            "run starts neither vllm serve, sglang.launch_server nor serve engine: its engine has to publish its events by "
            f"itself, on the port 1000 above its own ({OPTION} of vLLM)"
        )
        yield SpecWarning(KEY, message)
    if policy not in COMPARING:
        message = f"has no effect with load_balancing_policy {policy}: {', '.join(COMPARING)} compare prompts"
        yield SpecWarning(KEY, message)
    rented = sorted({one.cloud for one in resources if one.cloud and one.cloud not in WITHOUT_TLS})
    if rented:
        message = (
            f"has no effect for replicas on {', '.join(rented)}: they are reached over TLS, and events have the tokens of "
            "prompts without encryption"
        )
        yield SpecWarning(KEY, message)
