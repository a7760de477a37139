"""What each route of the two HTTP APIs does, for their pages and OpenAPI documents.

The tests compare these tables with the routes of the applications, so that no route is missing and none is invented.
"""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """One route. `query` and `body` map names to descriptions; `returns` describes the response of status 200."""

    method: str
    path: str
    summary: str
    returns: str
    query: tuple[tuple[str, str], ...] = ()
    body: tuple[tuple[str, str], ...] = ()
    text: bool = False  # the response is not JSON


_OFFSET = (
    ("offset", "position of the first byte; default 0"),
    ("max", "most bytes of the response"),
)
_OF_REPLICA = (
    ("offset", "position of the first byte, or, if negative, how many bytes before the end; default 0"),
    *_OFFSET[1:],
    ("since", "UNIX seconds: from the first line written then, instead of offset"),
)
_LOG = "the bytes; header X-Next-Offset has the offset of what follows"

CONTROLLER = (
    Operation("GET", "/v1/health", "Report whether the controller works.", "version, lease and problems"),
    Operation(
        "GET", "/v1/activity", "Return what the controller is doing, from memory, so that it responds while the database does not.",
        "{pid, stopping, database, lease, tick, clock_jump, cloud_calls}; durations in seconds end in _s",
    ),
    Operation(
        "GET", "/v1/services", "List services with their replicas, costs and notes. Supports If-None-Match. With `Cache-Control: max-stale` "
        "it returns the last list, with its age in seconds in the header Age, if the database responds slowly.",
        "{services: [...]}; 304 if nothing has changed",
        (("all", "also services that are down"), ("ended", "also replicas that have ended"),
         ("name", "only the service of that name, if one of that name is up")),
    ),
    Operation(
        "GET", "/v1/services/{name}", "Return one service as /v1/services lists it. Supports If-None-Match.", "the service",
        (("ended", "also replicas that have ended"),),
    ),
    Operation(
        "GET", "/v1/services/{name}/report", "Return the figures of `serve report`, and what was spent until when.",
        "{name, figures, curves, why}; figures and curves are null with the reason in why while there is nothing to report",
        (("since", "UNIX seconds"),),
    ),
    Operation(
        "GET", "/v1/services/{name}/explain", "Return why the last requests went where they went, of all load balancers.",
        "{requests: [...]}", (("limit", "requests of each load balancer, at most 100; default 20"),),
    ),
    Operation(
        "GET", "/v1/fleet", "Return all services in brief, without their replicas. Has an ETag.",
        "services as in /v1/services, with `traffic`: what load balancers counted in the last traffic_s seconds",
    ),
    Operation(
        "GET", "/v1/stream", "Send an event whenever what /v1/services shows has changed. Supports Last-Event-ID.",
        "server-sent events; id and data.changes are the count of changes; a comment every 15 s", text=True,
    ),
    Operation(
        "POST", "/v1/dashboard", "Open the port of the page and return its address with a code that works once.",
        "{url, port, expires_s}", body=(("port", "null: the configured or the last one"),),
    ),
    Operation(
        "PUT", "/v1/services/{name}", "Create a service or give it a new version.", "{name, version}",
        body=(
            ("spec", "the service file as JSON, as `serve validate -o json` prints it; 400 with the path of the key for what no file can say"),
            ("secrets", "values of the secrets that it names; stored encrypted"),
            ("mode", "null for a new service, rolling or blue_green for an update"),
        ),
    ),
    Operation(
        "POST", "/v1/services/{name}/chat", "Send a chat through the endpoint of a service and stream the response. The header "
        "X-Skyserve-Key has the API key, if the service needs one.",
        "what the endpoint responds: server-sent events of a chat completion",
        body=(("messages", "role and content of each"), ("max_tokens", "at most 4096; default 512")), text=True,
    ),
    Operation(
        "POST", "/v1/services/{name}/down", "Terminate a service.", "{}",
        body=(("purge", "true: do not wait for running requests, and let `POST /v1/tidy` remove the folders of `cache` from own hosts"),),
    ),
    Operation("POST", "/v1/services/{name}/replicas/{id}/down", "Terminate one replica, which is replaced.", "{}"),
    Operation(
        "GET", "/v1/services/{name}/replicas/{id}/access", "Return how commands run on a replica.",
        "{kind: session}, or where it is on the controller's host; no address and no key",
        (("node", "rank of a machine of a replica; default 0"),),
    ),
    Operation(
        "GET", "/v1/services/{name}/replicas/{id}/session", "Open a WebSocket for a command or a shell on a replica. The controller logs in to "
        "the machine; skyserve_cli/controller/sessions/relay.py has the messages. It ends within two seconds after its token was revoked.",
        "101; 409 without a machine, 429 with 16 open sessions of the caller", (("node", "rank of a machine of a replica; default 0"),),
    ),
    Operation(
        "GET", "/v1/services/{name}/history", "Return the replicas and versions of a service over time.",
        "intervals of replicas, prices and versions",
        (("since", "UNIX seconds"), ("most", "most replicas, at most 5000")),
    ),
    Operation(
        "GET", "/v1/services/{name}/series", "Return what load balancers counted over time: requests, errors, tokens, times to first "
        "token, cache hits, load.",
        "columns of equal length; slots of 10 s for the last 2 hours, of 1 minute for 2 days, else of 15 minutes",
        (("since", "UNIX seconds; default 2 hours ago"), ("replica", "only this replica; default the whole service")),
    ),
    Operation(
        "GET", "/v1/services/{name}/usage", "Return what the requests of each API key and model have used, by day.",
        "{name, since, until, by, rows, total}; rows have the groups, requests, tokens_in and tokens_out; with load_balancer.prices also usd, at "
        "the prices of today",
        (
            ("since", "first day, as 2026-11-27 (UTC); default 29 days before the last"),
            ("until", "last day; default today"),
            ("by", "groups: some of key, model and day, with commas; default key,model"),
            ("top", "at most this many rows, those with the most tokens first; default all, in order"),
        ),
    ),
    Operation(
        "POST", "/v1/plan", "Return where a service would run and what it would cost. Launches nothing.",
        "rows of places and prices, warnings",
        body=(
            ("spec", "the service file as JSON, as `serve validate -o json` prints it; 400 with the path of the key for what no file can say"),
            ("secrets", "values of the secrets that it names"),
            ("mode", "of an update; null for that of the file"),
        ),
    ),
    Operation(
        "GET", "/v1/events", "Return the event log.", "{events: [...]}, oldest first",
        (
            ("service", "only of this service"),
            ("after", "only events with a higher number"),
            ("limit", "most events, at most 10000; default 1000"),
            ("newest", "the last ones instead of the first"),
        ),
    ),
    Operation("GET", "/v1/logs/controller", "Read the log of the controller.", _LOG, _OFFSET, text=True),
    Operation(
        "GET", "/v1/logs/load_balancer/{name}", "Read the log of a service's load balancer.", _LOG, _OFFSET, text=True
    ),
    Operation(
        "GET", "/v1/logs/replica/{name}/{id}", "Read the log of a replica.", _LOG,
        _OF_REPLICA, text=True,
    ),
    Operation(
        "GET", "/v1/logs/replica/{name}/{id}/{node}", "Read the log of one machine of a replica.", _LOG,
        _OF_REPLICA, text=True,
    ),
    Operation(
        "POST", "/v1/tidy", "Remove what services that are down have left behind.", "{removed, waiting, problems}",
        body=(("services", "names of services"),),
    ),
    Operation("GET", "/v1/leaks/{cloud}", "List cloud resources that belong to no service of this home.", "the resources"),
    Operation(
        "POST", "/v1/leaks/{cloud}/remove", "Remove one of them.", '{why, passes}; why is "" if it was removed',
        body=(("kind", "of the resource"), ("id", "of the resource"), ("region", "of the resource")),
    ),
    Operation("POST", "/v1/leaks/{cloud}/forget", "Stop tracking a cloud that is no longer enabled.", "{problems}"),
    Operation("POST", "/v1/stop", "Stop the controller. Services go on serving.", "{pid}"),
    Operation(
        "GET", "/v1/teams", "Return the limits of each team and what it uses: of all teams to the owner and to admins, else of the "
        "caller's own.", "{teams: [{name, limits, used, services, waiting}]}",
    ),
    Operation("GET", "/v1/tokens", "List the tokens of others, also the revoked ones.", "{tokens: [...]}, never the tokens themselves"),
    Operation(
        "POST", "/v1/tokens", "Create a token.", "{token}; it is not stored, and not shown again",
        body=(
            ("name", "whose it is; the author of goals in the event log"),
            ("role", "viewer, operator or admin"),
            ("services", "names of the services that it covers; null: all"),
            ("team", "of config.yaml, whose quota the services that it starts use; empty: none"),
        ),
    ),
    Operation(
        "POST", "/v1/uploads", "Announce local files of a service: a manifest of a file or folder. Complete when nothing is missing.",
        "{reference, missing}: what a spec has in place of the path, and the SHA-256 of the parts that are to be sent",
        (("service", "whose files they are"),), body=(("manifest", "entries: {path, kind, mode, size, parts, link}"),),
    ),
    Operation(
        "POST", "/v1/uploads/parts", "Send missing parts: a line of JSON, [[SHA-256, size], ...], then their bytes. At most 8 MiB.",
        "{stored}: how many", (("service", "whose files they are"),),
    ),
    Operation("POST", "/v1/tokens/{token}/revoke", "Revoke the token of this name. The next call with it gets 401.", "{}"),
)  # fmt: skip

_TARGET = ("target", "id of a target; without it, the agent itself")

ADMIN = (
    Operation("GET", "/-/live", "Liveness of the agent.", "{}"),
    Operation(
        "GET", "/-/ready", "Readiness: 503 while no target is healthy, or the agent drains.", "{}",
        (("table", "with it, healthy targets do not matter: 503 while the agent has no table, or drains"),),
    ),
    Operation("GET", "/-/targets", "Return the table of targets.", "the table"),
    Operation("PUT", "/-/targets", "Replace the table. Stored before it is in force.", "{revision}"),
    Operation("GET", "/-/options", "Return the options of the agent.", "the options"),
    Operation("PATCH", "/-/options", "Change options; those not given stay.", "the options"),
    Operation(
        "POST", "/-/drain", "Send no new request to a target, or make the agent not ready.", "{}",
        (_TARGET, ("deadline_s", "seconds after which running streams are moved")),
    ),
    Operation("POST", "/-/undrain", "Undo a drain.", "{}", (_TARGET,)),
    Operation(
        "GET", "/-/stats", "Return demand and load.", "the numbers",
        (("window_s", "seconds; default 60"), ("build", "with it, `build` is how the agent runs: kind, fast_path, not_compiled, slow_tls")),
    ),
    Operation(
        "GET", "/-/demand", "Return requests, tokens and late requests of each minute that is over.",
        "columns with a number for each minute from `first` on",
        (("since", "the first minute, counted since 1970; default: all that are known, a day at most"),),
    ),
    Operation(
        "GET", "/-/totals", "Return what was counted since the agent started, of the whole and of each target.",
        "uptime_s, bounds of the buckets of times to first token, and lists of numbers in the order of lb.config.totals.Tally",
    ),
    Operation(
        "GET", "/-/usage", "Return what the requests of each API key and model have used, by day. A file keeps it over restarts.",
        "source, mark, more, and rows of day (since 1970, UTC), key, model, requests, tokens in, tokens out; of the last 8 days. "
        "`totals` is true if limits of days or months need what other agents have counted",
        (("source", "as in the last response"), ("since", "the mark of the last response: only rows that have changed since")),
    ),
    Operation(
        "POST", "/-/usage/totals", "Report to the agent what all agents of the service have counted today and in this month.",
        "the number of rows",
        body=(
            ("day", "today, counted from 1970-01-01 (UTC)"),
            (
                "rows", "at most 5,000, in order of keys and models: key, model, requests, tokens in and tokens out of today, tokens in and "
                "tokens out of the month; all models of a key are in one message",
            ),
        ),
    ),
    Operation("GET", "/-/metrics", "Expose Prometheus metrics.", "text exposition format", text=True),
    Operation("GET", "/-/keys", "Return usage and what is left of each API key.", "{keys: [...]}"),
    Operation(
        "GET",
        "/-/regions",
        "Return what is known of agents of other regions: round trips, silence, forwarded requests.",
        "{agent, here, policy, epoch, owned, peers: [...], distances_ms}",
    ),
    Operation(
        "GET", "/-/explain", "List the latest requests.", "the requests", (("limit", "most requests; default 20"),)
    ),
    Operation(
        "GET", "/-/explain/{request_id}", "Explain the routing of a request, step by step.",
        "steps with every candidate and cost",
    ),
    Operation("GET", "/workers", "List targets, as SGLang's gateway does.", "{workers, total, stats}"),
    Operation("POST", "/workers", "Add a target.", "202 with the target"),
    Operation("GET", "/workers/{id}", "Return a target.", "the target"),
    Operation("PUT", "/workers/{id}", "Replace a target.", "202 with the target"),
    Operation("PATCH", "/workers/{id}", "Change a target.", "202 with the target"),
    Operation("DELETE", "/workers/{id}", "Remove a target.", "202 with the target"),
    Operation(
        "POST", "/add_worker", "Add a target, as SGLang's router does.", "a sentence", (("url", "of the target"),), text=True
    ),
    Operation(
        "POST", "/remove_worker", "Remove a target, as SGLang's router does.", "a sentence",
        (("url", "of the target"),), text=True,
    ),
    Operation("GET", "/list_workers", "List the URLs of targets.", "{urls: [...]}"),
)  # fmt: skip
