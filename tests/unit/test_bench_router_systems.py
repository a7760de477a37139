"""What `benchmarks.router` starts: the configurations of Envoy and nginx, and the table of an agent in a region."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.certificates import certified
from benchmarks.router.envoy import envoy_config
from benchmarks.router.keys import NO_KEYS, Keys
from benchmarks.router.nginx import nginx_conf
from benchmarks.router.ours import ours, shared_arguments
from benchmarks.router.regional import table_of
from benchmarks.router.systems import ORIGIN, Group, Launch, Tls
from lb.config.schema import Table

FOLDER = Path("/folder")
TARGETS = [9001, 9002]


def tls(where: str) -> Tls | None:
    pems = (Path("/authority.pem"), Path("/certificate.pem"), Path("/key.pem"))
    return Tls(*pems, "targets" in where, "clients" in where) if where else None


def launch(where: str = "", group: Group = Group.PLAIN, workers: int = 1, folder: Path = FOLDER) -> Launch:
    return Launch(8000, TARGETS, group, folder, tls(where), workers)


WHERE = pytest.mark.parametrize(
    ("where", "to_targets", "from_clients"),
    [
        pytest.param("", False, False, id="plain"),
        pytest.param("targets", True, False, id="TLS to targets"),
        pytest.param("clients", False, True, id="TLS from clients"),
        pytest.param("targets clients", True, True, id="both"),
    ],
)
EXTRAS = pytest.mark.parametrize(
    ("group", "extras"), [(Group.PLAIN, False), (Group.PREFIX, False), (Group.EXTRAS, True)]
)
BALANCING = pytest.mark.parametrize("least_requests", [False, True])


def parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Filter chain, its HTTP connection manager, cluster."""
    (listener,), (cluster,) = (
        config["static_resources"]["listeners"],
        config["static_resources"]["clusters"],
    )
    (chain,) = listener["filter_chains"]
    return chain, chain["filters"][0]["typed_config"], cluster


@WHERE
def test_envoy_has_tls_where_it_is(where: str, to_targets: bool, from_clients: bool) -> None:
    chain, _, cluster = parts(envoy_config(launch(where), 9))
    assert ("transport_socket" in cluster) is to_targets
    assert ("transport_socket" in chain) is from_clients
    assert ("/authority.pem" in json.dumps(cluster)) is to_targets
    assert ("/key.pem" in json.dumps(chain)) is from_clients
    assert "/key.pem" not in json.dumps(cluster)


@EXTRAS
def test_envoy_has_extras_in_their_cell(group: Group, extras: bool) -> None:
    _, manager, _ = parts(envoy_config(launch(group=group), 9))
    names = [one["name"] for one in manager["http_filters"]]
    assert names == [*(["envoy.filters.http.cors"] if extras else []), "envoy.filters.http.router"]
    assert ("access_log" in manager) is extras
    assert (ORIGIN in json.dumps(manager)) is extras


@BALANCING
def test_envoy_balances_over_the_targets(least_requests: bool) -> None:
    config = envoy_config(launch(), 9, least_requests)
    _, manager, cluster = parts(config)
    assert cluster["lb_policy"] == ("LEAST_REQUEST" if least_requests else "ROUND_ROBIN")
    (locality,) = cluster["load_assignment"]["endpoints"]
    addresses = [one["endpoint"]["address"]["socket_address"] for one in locality["lb_endpoints"]]
    assert addresses == [{"address": "127.0.0.1", "port_value": port} for port in TARGETS]
    (host,) = manager["route_config"]["virtual_hosts"]
    assert host["routes"][0]["route"]["timeout"] == "0s"
    assert config["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 9}


@WHERE
def test_nginx_has_tls_where_it_is(where: str, to_targets: bool, from_clients: bool) -> None:
    conf = nginx_conf(launch(where))
    assert ("proxy_pass https://engines;" in conf) is to_targets
    assert ("proxy_ssl_verify on;" in conf) is to_targets
    assert ("/authority.pem" in conf) is to_targets
    assert ("backlog=4096 ssl;" in conf) is from_clients
    assert ("ssl_certificate /certificate.pem;" in conf) is from_clients


@EXTRAS
def test_nginx_has_extras_in_their_cell(group: Group, extras: bool) -> None:
    conf = nginx_conf(launch(group=group))
    assert ("access_log off;" in conf) is not extras
    assert (f"access_log {FOLDER}/access.log;" in conf) is extras
    assert (ORIGIN in conf) is extras


@BALANCING
def test_nginx_balances_over_the_targets(least_requests: bool) -> None:
    conf = nginx_conf(launch(workers=3), least_requests)
    assert ("least_conn;" in conf) is least_requests
    assert all(f"server 127.0.0.1:{port};" in conf for port in TARGETS)
    assert "worker_processes 3;" in conf
    assert "client_max_body_size 0;" in conf


@pytest.mark.parametrize(
    ("group", "workers", "arguments"),
    [
        pytest.param(Group.PLAIN, 1, [], id="nothing that an earlier agent does not know"),
        pytest.param(Group.PLAIN, 2, ["--workers", "2"], id="workers"),
        pytest.param(Group.EXTRAS, 1, ["--access-log"], id="extras"),
    ],
)
def test_our_agent_gets_what_no_table_has(group: Group, workers: int, arguments: list[str]) -> None:
    assert shared_arguments(launch(group=group, workers=workers)) == arguments


@pytest.mark.parametrize(
    ("where", "group", "keys", "there", "missing"),
    [
        pytest.param("", Group.PLAIN, NO_KEYS, ["round_robin"], ["--table-file", "--cors"], id="plain"),
        pytest.param("", Group.PREFIX, NO_KEYS, ["cache_aware"], ["round_robin"], id="by prefix"),
        pytest.param("", Group.PLAIN, Keys(1), ["--table-file"], ["--cors"], id="keys"),
        pytest.param("", Group.EXTRAS, NO_KEYS, ["--table-file", "--cors", "--access-log"], [], id="extras"),
        pytest.param("targets", Group.PLAIN, NO_KEYS, ["/authority.pem"], ["/key.pem"], id="TLS to targets"),
        pytest.param("clients", Group.PLAIN, NO_KEYS, ["/key.pem"], ["/authority.pem"], id="TLS to clients"),
    ],
)
def test_our_agent_is_started_by_its_command_line(
    where: str, group: Group, keys: Keys, there: list[str], missing: list[str], tmp_path: Path
) -> None:
    command = ours("skyserve", keys=keys).command(launch(where, group, folder=tmp_path))
    assert not set(there) - set(command)
    assert not set(missing) & set(command)


@pytest.mark.parametrize("where", ["", "targets"])
@EXTRAS
def test_an_agent_in_a_region_begins_with_its_table(
    where: str, group: Group, extras: bool, tmp_path: Path
) -> None:
    pki = certified(tmp_path, frozenset({where}))
    given = Launch(8000, TARGETS, group, tmp_path, pki)
    table = Table.from_json(table_of(given, "least_load", NO_KEYS, "off"))
    assert [target.url for target in table.targets] == given.urls
    assert table.policy == "least_load"
    assert table.continuation.mode.value == "off"
    assert table.listen is not None
    assert table.listen.host == "127.0.0.1"
    assert bool(table.access.keys) is extras
    assert bool(table.cors.origins) is extras
    pinned = bool(where)
    assert all(bool(target.tls_name) is pinned for target in table.targets)
    der = ssl.PEM_cert_to_DER_cert(pki.authority.read_text())
    assert table.targets_ca == (base64.b64encode(der).decode() if pinned else "")
