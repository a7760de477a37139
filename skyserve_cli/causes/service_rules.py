"""Rules for a service as a whole: its status, what the controller noted, its load balancers, its load. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyserve_cli.causes.facts import COMING, Facts, View, is_updating
from skyserve_cli.causes.log_text import last_line
from skyserve_cli.causes.rule import Found, Rule, logs, short, update, with_set
from skyserve_cli.output import place, plural, span

_BUDGET = re.compile(
    r"(\d+ replicas? (?:is|are)) not launched for the (budget|quota)(?: of the team (\S+))? \(([\w.]+)[^)]*\)"
)
_NO_OFFER = re.compile(r"no offer fits version \d+|nothing on offer fits")
_NO_ROOM = re.compile(r"every zone refused when last asked|every host or reservation of yours is full")
_FAILED = re.compile(r"version \d+ has failed: (.+); update the service")
_ALL_REFUSED = "every machine on offer was refused"
_CRASHES = re.compile(r"version (\d+) crashes: ([^;]+)")
_UNLISTED = re.compile(r"(\S+) cannot be listed: ([^;]+)")
_CUT_OFF = re.compile(r"this controller may be cut off: ([^;]+)")
_DEFECT = re.compile(r"its last turn failed \((\w+)\)")
#: More of the last minutes' requests with an error are a cause.
ERROR_SHARE = 0.05
LEAST_REQUESTS = 10


def _broken(facts: Facts) -> Found | None:
    if facts.view["status"] != "BROKEN":
        return None
    sentence = f"what is stored of the service cannot be read: {short(facts.notes.partition(';')[0], 110)}"
    return Found(sentence, f"serve update {facts.name} FILE")


def _going(facts: Facts) -> Found | None:
    if facts.view["status"] != "SHUTTING_DOWN":
        return None
    left = plural(len(_live(facts)), "replica")
    return Found(
        f"the service is being removed: `serve down` was run, and {left} is left to terminate".replace(
            "s is left", "s are left"
        ),
        f"serve down {facts.name} (waits for it)",
    )


def _stuck(facts: Facts) -> Found | None:
    if facts.view["status"] != "FAILED_CLEANUP":
        return None
    return Found(
        "the service was removed, but an instance of it has not disappeared for 10 minutes", "serve gc"
    )


def _down(facts: Facts) -> Found | None:
    return (
        Found("the service was taken down", f"serve up FILE --name {facts.name}")
        if facts.view["status"] == "DOWN"
        else None
    )


def _asleep(facts: Facts) -> Found | None:
    view = facts.view
    if (
        view["wanted"]
        or view["ready"]
        or facts.view["status"] not in ("NO_REPLICA", "REPLICA_INIT")
        or _live(facts)
    ):
        return None
    return Found(
        "the service sleeps: it is scaled to zero, and the first request wakes it",
        f"curl {view['endpoint']}/v1/models",
    )


def _cut_off(facts: Facts) -> Found | None:
    found = _CUT_OFF.search(facts.notes)
    if found is None:
        return None
    why = short(found[1], 100)
    return Found(
        f"the controller terminates nothing, because it may be cut off: {why}",
        "check the network of the controller's host, then: serve controller status",
    )


def _defect(facts: Facts) -> Found | None:
    found = _DEFECT.search(facts.notes)
    if found is None:
        return None
    return Found(
        f"the controller could not decide about the service ({found[1]}); its replicas are left as they are",
        "serve logs --controller --tail 50",
    )


def _budget(facts: Facts) -> Found | None:
    found = _BUDGET.search(facts.notes)
    if found is None:
        return None
    what, kind, team, key = found.groups()
    sentence = f"{what} not launched: the {kind}{f' of the team {team}' if team else ''} ({key}) {'is used up' if kind == 'quota' else 'leaves too little'}"
    if team:
        return Found(sentence, "serve teams (then raise it in config.yaml, or terminate what is not needed)")
    if key.startswith("controller"):
        return Found(
            sentence,
            "raise controller.max_usd_hour in config.yaml, then: serve controller stop && serve controller start (replicas are not touched)",
        )
    return Found(sentence, with_set(facts, "replica_policy.max_usd_hour", "USD"))


def _no_offer(facts: Facts) -> Found | None:
    if not _NO_OFFER.search(facts.notes):
        return None
    return Found(
        "no offer fits the resources of the service file", "serve plan FILE (it says which key leaves none)"
    )


def _unlisted(facts: Facts) -> Found | None:
    found = _UNLISTED.search(facts.notes)
    if found is None:
        return None
    return Found(
        f"{short(found[1], 40)} does not respond as it should: {short(found[2], 110)}", "serve check"
    )


def _launch_failed(facts: Facts) -> Iterator[tuple[str, Found]]:
    failure = facts.replica
    if failure is None:
        return
    where, said = place(failure), short(failure["message"], 90)
    match facts.reason:
        case "CAPACITY":
            every = "no zone has" if _NO_ROOM.search(facts.notes) else f"{where} has no"
            kind = str(failure["capacity_type"]).replace("_", "-")
            yield (
                "no_capacity",
                Found(
                    f"{every} {kind} capacity for the replica: {said}",
                    "serve plan FILE (then allow more zones, accelerators or clouds, or on-demand replicas)",
                ),
            )
        case "QUOTA":
            yield (
                "quota",
                Found(
                    f"a quota of the account is used up in {where}: {said}",
                    "request an increase in the cloud's console, then: serve catalog discover (reads the quotas again)",
                ),
            )
        case "AUTH":
            yield (
                "credentials",
                Found(
                    f"{failure['cloud']} refuses the controller's credentials or permissions: {said}",
                    "serve check (it names what lacks)",
                ),
            )
        case "REFUSED":
            yield (
                "refused",
                Found(
                    f"{where} refuses the launch: {said}", "serve plan FILE (it says where else it can be)"
                ),
            )
        case "CONFIG":
            yield (
                "wrong_config",
                Found(
                    f"the cloud rejects the launch as wrong everywhere: {said}",
                    update(facts, "correct the file"),
                ),
            )
        case "CLOUD_ERROR" | "LOST":
            yield "cloud_error", Found(f"{where} failed {facts.who}: {said}", f"serve events {facts.name}")
        case "PREEMPTED":
            yield (
                "preempted",
                Found(
                    f"{facts.who} in {where} was preempted: {said or 'the cloud took the spot instance'}",
                    f"serve status --watch {facts.name}",
                ),
            )


def _launch(cause: str) -> Rule:
    return Rule(
        cause, lambda facts: next((found for name, found in _launch_failed(facts) if name == cause), None)
    )


def _no_capacity(facts: Facts) -> Found | None:
    if not _NO_ROOM.search(facts.notes):
        return None
    return Found(
        "no zone has capacity for more replicas: every one refused when last asked",
        "serve plan FILE (then allow more zones, accelerators or clouds)",
    )


def _crashes(facts: Facts) -> Found | None:
    found = _CRASHES.search(facts.notes)
    if found is None:
        return None
    return Found(
        f"version {found[1]} crashes: {short(found[2], 120)}",
        f"serve logs {facts.name} --previous",
        last_line(facts.log),
    )


def _given_up(facts: Facts) -> Found | None:
    view = facts.view
    if view["version"] not in view["failed_versions"]:
        return None
    serves = view["serving_version"]
    then = "nothing serves" if serves is None else f"version {serves} serves"
    found = _FAILED.search(facts.notes)
    why = short(found[1], 110) if found else ""
    sentence = f"version {view['version']} was given up, and {then}{why and f': {why}'}"
    return Found(sentence, "serve plan FILE" if _ALL_REFUSED in why else update(facts, "correct the file"))


def _updating(facts: Facts) -> Found | None:
    view = facts.view
    if not is_updating(view):
        return None
    newest, serves = view["version"], view["serving_version"]
    ready = sum(r["state"] == "READY" and r["version"] == newest for r in view["replicas"])
    sentence = f"an update is in progress: {ready} of {view['wanted']} replicas of version {newest} are ready, and version {serves} serves"
    return Found(sentence, f"serve status --watch {facts.name}")


def _starting(facts: Facts) -> Found | None:
    coming = [replica for replica in _live(facts) if replica["state"] in COMING]
    if facts.view["ready"] >= facts.view["wanted"] or not coming:
        return None
    one = facts.replica if facts.replica in coming else coming[0]
    doing = short(one["message"] or last_line(facts.log), 80)
    how_long = span(facts.now - one["since"])
    sentence = f"{facts.view['ready']} of {facts.view['wanted']} replicas are ready; replica {one['id']} has been {one['state']} for {how_long}"
    return Found(sentence + (f": {doing}" if doing else ""), f"{_logs_of(facts, one)} -f")


def _missing(facts: Facts) -> Found | None:
    view = facts.view
    if view["ready"] >= view["wanted"]:
        return None
    sentence = f"{view['ready']} of {view['wanted']} replicas are ready, and none is on its way: {short(facts.notes, 110) or 'the controller is about to decide'}"
    return Found(sentence, f"serve events {facts.name}")


def _unsynced(facts: Facts) -> Found | None:
    for agent in _agents(facts.view):
        is_own = "id" in agent
        who = f"load balancer {agent['id']}" if is_own else "the load balancer beside the controller"
        number = f" {agent['id']}" if is_own else ""
        log = f"serve logs {facts.name}{number} --load-balancer --tail 50"
        if is_own and agent.get("trouble"):
            return Found(f"{who} does not serve as it should: {short(agent['trouble'], 120)}", log)
        if not agent["alive"]:
            return Found(f"{who} does not run, so that clients cannot connect", log)
        if not agent["synced"]:
            return Found(f"{who} does not have the newest table of targets yet", log)
    return None


def _no_endpoint(facts: Facts) -> Found | None:
    if not facts.endpoint_trouble:
        return None
    view = facts.view
    sentence = f"{view['ready']} of {view['wanted']} replicas are ready, but {view['endpoint']} takes no connection from here: {short(facts.endpoint_trouble)}"
    log = f"serve logs {facts.name} --load-balancer --tail 50"
    is_here = view["endpoint_reach"] == "this_machine"
    return Found(sentence, log if is_here else f"open its port in firewalls on the way, or see: {log}")


def _overloaded(facts: Facts) -> Found | None:
    view = facts.view
    queued, share = view["load"]["queued"], facts.errors / max(1, facts.requests)
    if not queued and (share <= ERROR_SHARE or facts.requests < LEAST_REQUESTS):
        return None
    coming = sum(replica["state"] in COMING for replica in _live(facts))
    have = "all replicas are READY and busy"
    what = f"{plural(queued, 'request')} in the queue (clients get 429 or 503 when it is full)"
    if not queued:
        have, what = (
            "all replicas are READY",
            f"{facts.errors} of the last {facts.requests} requests got an error (429 or 5xx)",
        )
    if coming:
        return Found(f"{have}, {what}; {coming} more on the way", f"serve status --watch {facts.name}")
    if not queued:
        return Found(f"{have}, but {what}", f"serve test {facts.name}")
    return Found(
        f"{have}, {what}, no more are on the way",
        with_set(facts, "replica_policy.max_replicas", 2 * max(1, view["wanted"])),
    )


def _live(facts: Facts) -> list[View]:
    return [replica for replica in facts.view["replicas"] if replica["state"] != "GONE"]


def _agents(view: View) -> list[View]:
    own = [one for one in view["load_balancers"] if one["state"] not in ("DRAINING", "TERMINATING")]
    return own or [one for one in (view["load_balancer"],) if one]


def _logs_of(facts: Facts, replica: View) -> str:
    return f"serve logs {facts.name} {replica['id']}" if replica is not facts.replica else logs(facts)


#: The service cannot be served, or is not to be, whatever its replicas do.
STATUS = (
    Rule("broken", _broken),
    Rule("shutting_down", _going),
    Rule("cleanup_failed", _stuck),
    Rule("down", _down),
    Rule("held_back", _cut_off),
    Rule("controller_error", _defect),
)
#: Why no replica is launched.
LIMITS = (Rule("budget", _budget), Rule("no_offer", _no_offer))
LAUNCHES = tuple(
    _launch(cause)
    for cause in (
        "no_capacity",
        "quota",
        "credentials",
        "refused",
        "wrong_config",
        "cloud_error",
        "preempted",
    )
)
CRASHES = Rule("crashes", _crashes)
#: What is said of a service that is short of replicas, if nothing more precise is.
SHORTAGES = (
    Rule("version_given_up", _given_up),
    Rule("no_capacity", _no_capacity),
    Rule("cloud_silent", _unlisted),
    Rule("asleep", _asleep),
    Rule("updating", _updating),
    Rule("starting", _starting),
    Rule("short", _missing),
)
#: What clients may meet although replicas are ready.
SERVING = (
    Rule("load_balancer", _unsynced),
    Rule("endpoint_unreachable", _no_endpoint),
    Rule("updating", _updating),
    Rule("overloaded", _overloaded),
)
