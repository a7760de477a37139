"""What the Pod of a replica gets when no patch says otherwise, after all patches. Pure.

A Pod that need not run as root gets what PodSecurity `restricted` asks for besides. An image that runs as root keeps the capabilities of
its runtime, because `apt-get` in `setup` needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from provisioners.kubernetes.quantities import amount

Json = dict[str, Any]

#: Of every Pod and container of ours. A patch removes them with null.
OF_POD: Mapping[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
OF_CONTAINER: Mapping[str, Any] = {"allowPrivilegeEscalation": False}
_FOLLOWERS = ("files",)
_USUAL = ("cpu", "memory", "ephemeral-storage")


def finish(pod: Json, main: str, limited: Collection[str] = ()) -> Json:
    """Return the Pod, changed: what follows from its own settings is set.

    `limited` are the resources of which the namespace's quota wants limits: those without one get their request.
    """
    spec = pod["spec"]
    container = next(one for one in spec["containers"] if one["name"] == main)
    context = container.setdefault("securityContext", {})
    if runs_as_other(spec, container):
        context.setdefault("capabilities", {"drop": ["ALL"]})
    if _needs_escalation(context) and context.get("allowPrivilegeEscalation") is False:
        del context["allowPrivilegeEscalation"]
    for one in spec["containers"]:
        _agree(one.get("resources") or {}, limited)
    resources = container.get("resources") or {}
    for one in spec.get("initContainers") or ():
        if one["name"] in _FOLLOWERS:
            one["securityContext"] = dict(context)
            one["resources"] = {section: _usual(each) for section, each in resources.items() if _usual(each)}
        else:
            _agree(one.get("resources") or {}, limited)
    return pod


def runs_as_other(spec: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """Return whether the container must not run as root."""
    contexts = (container.get("securityContext") or {}, spec.get("securityContext") or {})
    said = next((one["runAsNonRoot"] for one in contexts if "runAsNonRoot" in one), None)
    user = next((one["runAsUser"] for one in contexts if "runAsUser" in one), 0)
    return bool(said) or (said is None and user > 0)


def _needs_escalation(context: Mapping[str, Any]) -> bool:
    added = (context.get("capabilities") or {}).get("add") or ()
    return bool(context.get("privileged")) or bool({"SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"} & set(added))


def _agree(resources: Json, limited: Collection[str]) -> None:
    """A limit below the request lowers the request, as a server accepts no other pair."""
    requests = resources.get("requests") or {}
    for name in limited:
        if name in requests and name not in (resources.get("limits") or {}):
            resources.setdefault("limits", {})[name] = requests[name]
    for name, limit in (resources.get("limits") or {}).items():
        if name in requests and amount(requests[name]) > amount(limit):
            requests[name] = limit


def _usual(amounts: Mapping[str, Any]) -> Json:
    return {name: value for name, value in amounts.items() if name in _USUAL}
