"""The Rust routers: sglang-router, smg and vllm-router, from their wheels."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.router.machine import free_port
from benchmarks.router.systems import ORIGIN, Family, Group, Launch, System
from benchmarks.router.wheels import installed


@dataclass(frozen=True, slots=True)
class _Router:
    package: str
    version: str
    program: tuple[str, ...]
    log_level: str
    can_tls: bool = False


_ROUTERS = (
    _Router("sglang-router", "0.3.2", ("sglang-router", "launch"), "warn", can_tls=True),
    _Router("smg", "1.13.0", ("smg", "launch"), "warn"),
    _Router("vllm-router", "0.1.17", ("vllm-router",), "warning"),
)
RUST_ROUTERS = tuple(router.package for router in _ROUTERS)


def rust_router(name: str, metrics: bool = True) -> System:
    """A Rust router, installed when it is first needed. Raises Missing.

    Metrics are an option of theirs that we have on, for ours and any in production are; without them they are
    somewhat cheaper. None of them checks keys of clients by limits, so they check none.
    """
    router = next(router for router in _ROUTERS if router.package == name)
    folder, version = installed(router.package, router.version)

    def command(launch: Launch) -> list[str]:
        program = [str(folder / "bin" / router.program[0]), *router.program[1:]]
        # Their thresholds are the defaults: with prompts that differ from the first byte on, they spread.
        policy = ["--policy", "cache_aware" if launch.group is Group.PREFIX else "round_robin"]
        # A port of its own: several of them are up at a time, and the default would collide.
        metrics_port = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        tls: list[str] = []
        if launch.tls_targets is not None:
            tls += ["--ca-cert-paths", str(launch.tls_targets.authority)]
        if launch.tls_clients is not None:
            tls += ["--tls-cert-path", str(launch.tls_clients.certificate)]
            tls += ["--tls-key-path", str(launch.tls_clients.key)]
        return [
            *program,
            *("--host", "127.0.0.1", "--port", str(launch.port), "--worker-urls", *launch.urls),
            *policy,
            *("--log-level", router.log_level),
            *(metrics_port if metrics else []),
            *tls,
            *(["--cors-allowed-origins", ORIGIN] if launch.has_extras else []),
            *("--worker-startup-check-interval", "1"),  # of 30 s, only felt while it starts
        ]

    return System(
        name,
        Family.RUST,
        version,
        command,
        ("round_robin", "cache_aware"),
        can_tls=router.can_tls,
        # Tokio has as many threads as there are cores, unless this says otherwise.
        environment=lambda launch: (
            {"TOKIO_WORKER_THREADS": str(launch.workers)} if launch.workers > 1 else {}
        ),
    )
