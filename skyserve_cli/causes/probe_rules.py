"""Rules for what readiness probes of a replica met, and for what its clients got. The first that fits is the cause. Pure."""

from __future__ import annotations

import re

from skyserve_cli.causes.facts import LOADED, Address, Facts
from skyserve_cli.causes.log_text import last_line
from skyserve_cli.causes.rule import Found, Rule, logs, short, update, with_set
from skyserve_cli.output import span

_REFUSED = re.compile(r"(?i)connect(?:ion)? refused|Connect call failed")
_STATUS = re.compile(r"probe returned (\d{3})(?:, to (\S+))?")
_LIMIT = re.compile(r"within ([\d.e+]+) s")
_LATE = re.compile(r"took longer than|no connection within|timed out")
_TLS = re.compile(r"(?i)certificate|\bSSL\b|\bTLS\b|wrong version number|handshake")
_DNS = re.compile(r"(?i)name or service not known|name resolution|nodename nor servname|getaddrinfo")
_NOT_HTTP = re.compile(r"(?i)not HTTP|connection was closed|reset by peer|response is too long")
_UNROUTED = re.compile(r"(?i)no route to host|network is unreachable|host is down")
#: Longer than a program needs that only imports its libraries.
LONG_START_S = 60.0


def _other_address(facts: Facts) -> Address | None:
    """Return where the program listens, if that is not where it is probed."""
    port = facts.port()
    found = list(facts.addresses())
    at_loopback = facts.at().startswith(("127.", "localhost"))
    if any(each.port == port and (at_loopback or not each.is_loopback) for each in found):
        return None
    return min(found, key=lambda each: each.port != port, default=None)


def _wrong_port(facts: Facts) -> Found | None:
    other = _other_address(facts) if _REFUSED.search(facts.probe) else None
    if other is None or other.port == facts.port():
        return None
    sentence = f"the server of {facts.who} listens on {other}, but its probes go to port {facts.port()} ($SKYSERVE_REPLICA_PORT)"
    return Found(
        sentence,
        update(facts, f"let it listen on 0.0.0.0:$SKYSERVE_REPLICA_PORT, or set ports to {other.port}"),
    )


def _loopback(facts: Facts) -> Found | None:
    other = _other_address(facts) if _REFUSED.search(facts.probe) else None
    if other is None or other.port != facts.port():
        return None
    sentence = f"the server of {facts.who} listens on {other} only, and its probes come from another host, to {facts.at()}"
    return Found(sentence, update(facts, "let it listen on 0.0.0.0 (--host 0.0.0.0)"))


def _refused(facts: Facts) -> Found | None:
    if not _REFUSED.search(facts.probe):
        return None
    if facts.state in ("NOT_READY", "READY"):
        return Found(
            f"{facts.who} refuses connections at {facts.at()}: its server has stopped listening", logs(facts)
        )
    age_s = facts.now - facts.replica["since"] if facts.replica is not None else 0.0
    if not facts.reason and age_s < LONG_START_S:
        return None
    sentence = f"no program of {facts.who} listened on port {facts.port()} within {_limit(facts):g} s of starting `run`"
    did = last_line(facts.log)
    doing = f"; it printed last: {short(did, 80)}" if did else ""
    sentence += doing
    if not facts.reason:
        sentence = f"{facts.who} has been STARTING for {span(age_s)}: nothing listens on its port {facts.port()} yet{doing}"
    return Found(sentence, _longer(facts, "listen on 0.0.0.0:$SKYSERVE_REPLICA_PORT"), last_line(facts.log))


def _limit(facts: Facts) -> float:
    found = _LIMIT.search(facts.message)
    return float(found[1]) if found else 0.0


def _longer(facts: Facts, change: str) -> str:
    """Return what gives the next replica another chance: a changed `run`, or more time if it needs that."""
    if not facts.reason:
        return f"{logs(facts)} -f; if it is done with its start, let it {change}"
    more = max(60, round(2 * _limit(facts)))
    return f"let it {change}, or give it more time: {with_set(facts, 'readiness_probe.initial_delay_seconds', more)}"


def _key_missing(facts: Facts) -> Found | None:
    status = _status(facts)
    if status not in (401, 403):
        return None
    why = "a key that it does not send" if status == 401 else "a key or rights that it does not have"
    sentence = f"the readiness probe of {facts.who} gets {status}: the server wants {why}"
    return Found(
        sentence,
        update(facts, "set readiness_probe.headers to {Authorization: Bearer $API_KEY}", "--secret API_KEY"),
    )


def _no_path(facts: Facts) -> Found | None:
    if _status(facts) != 404:
        return None
    sentence = f"the readiness probe of {facts.who} gets 404: its server has no such path"
    return Found(
        sentence,
        with_set(facts, "readiness_probe.path", "/PATH") + " (/health or /v1/models of most engines)",
    )


def _redirected(facts: Facts) -> Found | None:
    found = _STATUS.search(facts.probe)
    if found is None or not found[1].startswith("3"):
        return None
    where = f" to {short(found[2], 100)}" if found[2] else ""
    sentence = f"the readiness probe of {facts.who} is redirected ({found[1]}){where}, and only follows to its own host"
    return Found(
        sentence, with_set(facts, "readiness_probe.path", "/PATH") + " (one that returns 200 itself)"
    )


def _server_error(facts: Facts) -> Found | None:
    status = _status(facts)
    if status is None or status < 500 or facts.reason == "START_TIMEOUT":
        return None
    what = "runs, and is not ready yet" if facts.state == "STARTING" else "fails"
    sentence = f"the readiness probe of {facts.who} gets {status}: its server {what}"
    return Found(sentence, f"{logs(facts)} -f", last_line(facts.log))


def _refused_probe(facts: Facts) -> Found | None:
    status = _status(facts)
    if status is None or status == 200 or status >= 500:
        return None
    sentence = f"the readiness probe of {facts.who} gets {status}, not 200"
    return Found(sentence, update(facts, "correct readiness_probe (path, post_data, headers)"))


def _status(facts: Facts) -> int | None:
    found = _STATUS.search(facts.probe)
    return int(found[1]) if found else None


def _loaded(facts: Facts) -> Found | None:
    if not facts.message.startswith(LOADED):
        return None
    sentence = (
        f"{facts.who} is loaded: its readiness probe waits behind requests of clients, who get responses"
    )
    return Found(sentence, with_set(facts, "replica_policy.max_replicas", max(2, 2 * facts.view["wanted"])))


def _hung(facts: Facts) -> Found | None:
    if not _LATE.search(facts.probe):
        return None
    if "no connection" in facts.probe:
        sentence = (
            f"{facts.who} takes no connection at {facts.at()}: a firewall drops it, or its machine hangs"
        )
        return Found(sentence, f"serve ssh {facts.name} --replica {_id(facts)}")
    sentence = f"{facts.who} takes connections and gives the readiness probe no response: its server hangs, or is slower than timeout_seconds"
    return Found(
        sentence,
        f"{logs(facts)} --tail 50; if it is slow: {with_set(facts, 'readiness_probe.timeout_seconds', 60)}",
    )


def _id(facts: Facts) -> int:
    return 0 if facts.replica is None else int(facts.replica["id"])


def _tls(facts: Facts) -> Found | None:
    if not _TLS.search(facts.probe):
        return None
    why = short(facts.probe, 100)
    if "WRONG_VERSION_NUMBER" in facts.probe:
        why = f"one side speaks TLS, the other plain HTTP ({why})"
    sentence = f"the readiness probe of {facts.who} fails on TLS: {why}"
    return Found(
        sentence, update(facts, "let the server speak plain HTTP (the load balancer has the certificate)")
    )


def _dns(facts: Facts) -> Found | None:
    if not _DNS.search(facts.probe):
        return None
    sentence = f"the controller cannot resolve the host of {facts.who} ({facts.at()}): {short(facts.probe)}"
    return Found(sentence, "check the name servers of the controller's host, then: serve controller status")


def _unrouted(facts: Facts) -> Found | None:
    if not _UNROUTED.search(facts.probe):
        return None
    return Found(
        f"the controller has no route to {facts.who} at {facts.at()}: {short(facts.probe)}", "serve check"
    )


def _not_http(facts: Facts) -> Found | None:
    if not _NOT_HTTP.search(facts.probe):
        return None
    sentence = f"what listens at {facts.at()} of {facts.who} speaks no HTTP/1.1 (TLS, gRPC, another protocol?): {short(facts.probe)}"
    return Found(sentence, update(facts, "let an HTTP server listen on $SKYSERVE_REPLICA_PORT"))


def _only_errors(facts: Facts) -> Found | None:
    if facts.reason != "ONLY_ERRORS":
        return None
    return Found(
        f"{facts.who} was replaced: its server ran, and gave clients nothing but errors (5xx)",
        logs(facts),
        last_line(facts.log),
    )


def _too_slow(facts: Facts) -> Found | None:
    if facts.reason != "START_TIMEOUT":
        return None
    did = last_line(facts.log)
    doing = f"; it printed last: {short(did, 90)}" if did else ""
    if "not set up" in facts.message:
        return Found(f"`setup` of {facts.who} took longer than {_limit(facts):g} s{doing}", logs(facts))
    more = max(60, round(2 * _limit(facts)))
    sentence = f"{facts.who} was not ready within {_limit(facts):g} s of starting `run`{doing}"
    return Found(sentence, with_set(facts, "readiness_probe.initial_delay_seconds", more))


def _other_probe(facts: Facts) -> Found | None:
    if not facts.probe or facts.state == "READY":
        return None
    if facts.state == "STARTING" and _REFUSED.search(facts.probe):
        return None  # it has not been starting for long
    return Found(f"the readiness probe of {facts.who} fails: {short(facts.probe, 120)}", logs(facts))


RULES = (
    Rule("only_errors", _only_errors),
    Rule("wrong_port", _wrong_port),
    Rule("loopback_only", _loopback),
    Rule("probe_key_missing", _key_missing),
    Rule("probe_path", _no_path),
    Rule("probe_redirected", _redirected),
    Rule("probe_server_error", _server_error),
    Rule("probe_refused", _refused_probe),
    Rule("loaded", _loaded),
    Rule("hung", _hung),
    Rule("probe_tls", _tls),
    Rule("probe_dns", _dns),
    Rule("no_route", _unrouted),
    Rule("not_http", _not_http),
)

#: After what the log shows: that it does not listen yet is no cause of its own.
NOT_LISTENING = (
    Rule("not_listening", _refused),
    Rule("start_too_slow", _too_slow),
    Rule("probe_fails", _other_probe),
)
