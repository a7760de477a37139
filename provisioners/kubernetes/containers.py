"""What the containers of a Pod report: how ours ended, and what keeps it from starting. Pure.

A Pod of ours has the container `main`, and one before it that unpacks files. Service meshes and others inject more: a sidecar is an
ordinary container, or an init container that is restarted for as long as the Pod lives. A sidecar's exit never is ours. What keeps an
init container or a restarted one from starting keeps `main` from starting too, and so is reported with its name.

`_HOLDS` has a row for each reason why a container waits, the first that fits:

    what                                            ends the wait
    the registry limits the rate                    nothing: the kubelet tries again, later each time
    the registry cannot be reached, or is busy      nothing
    the node's disk is full                         the node is given up after 3 minutes
    there is no such image, or no access to it      the setup has failed when the second pull has
    another failure of a pull                       the setup has failed after 10 minutes
    an image name that is invalid                    the setup has failed at once
    the image runs as root, which is not allowed    the setup has failed at once
    a Secret or ConfigMap is missing; other errors  the setup has failed after 3 minutes, as it may appear

A Pod that waits on its node without such a reason has it in its events; `_EVENTS` has their rows:

    a volume cannot be mounted or attached          the setup has failed after 10 minutes
    the node cannot make the Pod's sandbox          the node is given up after 3 minutes
    its image is being pulled                       nothing
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from provisioners.kubernetes import scripts
from provisioners.kubernetes.sightings import Sightings
from provisioners.kubernetes.translate import MAIN
from provisioners.remote.host_agent.exits import FOREGROUND

Pod = Mapping[str, Any]
Status = Mapping[str, Any]

SOON_S = 180.0
LATE_S = 600.0
_SECOND_PULL_S = 15.0  # the kubelet waits 10 s after the first; the registry's Secret comes after the Pod

_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_NAMES = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_CONFIGURATION = frozenset({"CreateContainerConfigError"})
_START = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
        "CrashLoopBackOff",
    }
)
_NEVER_RAN = frozenset({"StartError", "ContainerCannotRun"})


class Hold(NamedTuple):
    """A kind of reason why a container waits. `fails_after_s` None: it may wait for as long as the service lets it."""

    kind: str
    reasons: frozenset[str]
    pattern: str
    fails_after_s: float | None
    is_the_nodes: bool = False


_HOLDS = (
    Hold("rate limit", _PULLS, r"\b429\b|too ?many ?requests|rate.?limit", None),
    Hold(
        "network",
        _PULLS,
        r"time.?out|timed out|deadline exceeded|connection (refused|reset)|no such host|\bEOF\b|TLS handshake"
        r"|no route to host|unreachable|temporary failure|server misbehaving|service unavailable|bad gateway"
        r"|\b50[0-4]\b|internal server error",
        None,
    ),
    Hold("disk", _PULLS, r"no space left", SOON_S, is_the_nodes=True),
    Hold(
        "no image",
        _PULLS,
        r"not found|no such image|manifest.unknown|does not exist|no matching manifest|name.unknown",
        _SECOND_PULL_S,
    ),
    Hold(
        "no access",
        _PULLS,
        r"unauthorized|denied|forbidden|authentication|no basic auth|\b40[13]\b",
        _SECOND_PULL_S,
    ),
    Hold("pull", _PULLS, "", LATE_S),
    Hold("name", _NAMES, "", 0.0),
    Hold("user", _CONFIGURATION, r"runAsNonRoot|non-numeric user", 0.0),
    Hold("start", _START, "", SOON_S),
)
_EVENTS = (
    Hold("mount", frozenset({"FailedMount", "FailedAttachVolume"}), "", LATE_S),
    Hold(
        "sandbox",
        frozenset({"FailedCreatePodSandBox", "NetworkNotReady"}),
        "",
        SOON_S,
        is_the_nodes=True,
    ),
    Hold("pulling", frozenset({"Pulling"}), "", None),
)
_BY_KIND = {hold.kind: hold for hold in (*_HOLDS, *_EVENTS)}
_PREFIX = "held: "


def main_of(pod: Pod) -> Status:
    """Return the status of our container; empty if there is none yet."""
    return next((one for one in _statuses(pod, "containerStatuses") if one.get("name") == MAIN), {})


def end_of(container: Status) -> Mapping[str, Any] | None:
    """Return how the container has ended, if it has."""
    return (container.get("state") or {}).get("terminated")


def is_running(container: Status) -> bool:
    return "running" in (container.get("state") or {})


def failed_init(pod: Pod) -> Status | None:
    """Return the init container that has failed, so that ours never starts."""
    for one in _statuses(pod, "initContainerStatuses"):
        end = end_of(one)
        if end is not None and end.get("exitCode") and one.get("name") not in _restarted(pod):
            return one
    return None


def has_started_any(pod: Pod) -> bool:
    """Return whether a container of the Pod, a sidecar too, runs or has run."""
    both = (*_statuses(pod, "initContainerStatuses"), *_statuses(pod, "containerStatuses"))
    return any(is_running(one) or end_of(one) is not None for one in both)


def is_lost_by_node(container: Status) -> bool:
    """Return whether the node does not know what became of the container: it was started again, or lost its runtime."""
    end = end_of(container)
    return end is not None and end.get("reason") == "ContainerStatusUnknown"


def is_setups(container: Status) -> bool:
    """Return whether a container that has ended had not come to `run`."""
    end = end_of(container) or {}
    why = str(end.get("message") or "").strip()
    return (
        container.get("name") != MAIN
        or why.startswith(scripts.SETUP_FAILED)
        or end.get("reason") in _NEVER_RAN
    )


def sentence_of(container: Status) -> str:
    """Return how a container has ended, as a sentence."""
    end, name = end_of(container) or {}, container.get("name")
    why, code = str(end.get("message") or "").strip(), end.get("exitCode")
    how = "it used more memory than it may (OOMKilled)" if end.get("reason") == "OOMKilled" else ""
    if is_setups(container):
        cannot = f"{end['reason']}: " if end.get("reason") in _NEVER_RAN else ""
        return f"{cannot}{why or how or f'{name} exited'} (exit code {code})"
    if code == 0 and not how:
        how = "; it printed last: ".join(filter(None, (FOREGROUND, why)))
    return f"run exited with code {code}" + (f": {how or why}" if how or why else "")


def holds_of(pod: Pod, before: Sightings, event: tuple[str, str] | None) -> Iterator[tuple[str, str]]:
    """Yield what keeps our container from starting, as the name of a fact and a sentence.

    `event` is the reason and the sentence of the Pod's last event, as far as it was read.
    """
    main = main_of(pod)
    if is_running(main) or end_of(main) is not None:
        return
    for container in (*_statuses(pod, "initContainerStatuses"), main):
        waiting = (container.get("state") or {}).get("waiting") or {}
        found = _hold(container, waiting, before)
        if found is not None:
            yield found
            return
    if event is not None:
        hold = next((one for one in _EVENTS if event[0] in one.reasons), None)
        if hold is not None:
            yield f"{_PREFIX}{hold.kind}", ": ".join(event)


def hold_named(fact: str) -> Hold | None:
    """Return the kind of hold that a fact of that name is."""
    return _BY_KIND[fact.removeprefix(_PREFIX)] if fact.startswith(_PREFIX) else None


def _hold(container: Status, waiting: Mapping[str, Any], before: Sightings) -> tuple[str, str] | None:
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    # An image may be called anything.
    plain = message.replace(str(container.get("image") or "\0"), "")
    hold = next(
        (one for one in _HOLDS if reason in one.reasons and re.search(one.pattern, plain, re.IGNORECASE)),
        None,
    )
    if hold is None:
        return None
    if hold.kind == "pull" and reason == "ImagePullBackOff":
        # Between two pulls older kubelets report the back-off alone: the cause is that of the last pull.
        known = next((name for name in before if (one := hold_named(name)) and one.reasons == _PULLS), None)
        if known is not None:
            return known, before[known].text
    shown = "ImagePullBackOff" if reason == "ErrImagePull" else reason
    who = "" if container.get("name") == MAIN else f"{container.get('name')}: "
    return f"{_PREFIX}{hold.kind}", f"{who}{shown}: {message or 'no reason was given'}"


def _restarted(pod: Pod) -> frozenset[str]:
    """Return the names of the init containers that run beside the others."""
    inits = (pod.get("spec") or {}).get("initContainers") or ()
    return frozenset(str(one.get("name")) for one in inits if one.get("restartPolicy") == "Always")


def _statuses(pod: Pod, which: str) -> list[Status]:
    return list((pod.get("status") or {}).get(which) or ())
