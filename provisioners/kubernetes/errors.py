"""What a refusal of the Kubernetes API means. Pure.

The API answers with a `Status`: an HTTP code, a reason and a sentence. The reason `Forbidden` alone covers permissions, quotas,
limits, policies and names that do not exist, so the sentence decides between them (`Status` in k8s.io/apimachinery, messages of the
admission plug-ins). A permission is missing where the sentence begins with the user; any other is about the object.
"""

from __future__ import annotations

import json
import re
from typing import Any

from policies.model import FailureKind, Scope, Zone
from provisioners.port.error_codes import ErrorCode, ErrorTable
from provisioners.port.errors import ProvisionError, TransientError, error_for

CLOUD = "kubernetes"
RETRY_S = 2.0
_MOST_RETRY_S = 60.0
_K = FailureKind
_SOURCE = "Kubernetes API concepts; k8s.io/apiserver admission plug-ins"
ESCALATION = r"attempting to grant RBAC permissions not currently held"

_LIMITS = "write what it asks for in kubernetes.pod, as spec: {containers: [{name: main, resources: {limits: {cpu: '4', memory: 16Gi}}}]}"
_LIMIT_RANGE = f"that is the namespace's LimitRange: choose other resources.cpus and memory, or {_LIMITS}"
_NOT_ROOT = (
    "of an image that need not run as root, write in kubernetes.pod spec: {securityContext: {runAsNonRoot: true, runAsUser: 1000}}; "
    "the rest follows (docs/howto/company-cluster.md)"
)
_NO_NODE_CACHE = (
    "this namespace lets no Pod have a folder of its node (PodSecurity baseline and restricted refuse hostPath): write "
    "cache: {kind: pvc, claim: NAME} in the service file, with a claim that is ReadWriteMany"
)

TABLE = ErrorTable(
    (
        # Webhooks have any code; those that are away have 500.
        ErrorCode(
            "400 403 404 409 422 500",
            _K.REFUSED,
            "that is a policy of the cluster: correct kubernetes.pod, or ask who runs it for an exception",
            _SOURCE,
            r"admission webhook .* denied the request|ValidatingAdmissionPolicy .* denied request",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.TRANSIENT,
            "a server that has just started does not know its roles yet",
            _SOURCE,
            r"RBAC: \[?\w*role\S* \"[^\"]+\" not found",
            retry_s=2.0,
        ),
        ErrorCode(
            "403",
            _K.QUOTA,
            "ask for a larger ResourceQuota, or use another namespace",
            _SOURCE,
            r"exceeded quota|insufficient quota to match these scopes",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            f"the namespace's ResourceQuota wants every container to say it: {_LIMITS}",
            _SOURCE,
            r"failed quota: .* must specify",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            _LIMIT_RANGE,
            _SOURCE,
            r"(minimum|maximum) \S+ usage per|limit to request ratio",
            Scope.TYPE,
        ),
        ErrorCode(
            "422",
            _K.REFUSED,
            f"the namespace's LimitRange has a limit for containers without one: {_LIMITS}",
            _SOURCE,
            r"must be less than or equal to \S+ limit",
            Scope.TYPE,
        ),
        ErrorCode(
            "403", _K.REFUSED, _NO_NODE_CACHE, _SOURCE, r"violates PodSecurity.*skyserve-cache", Scope.REGION
        ),
        ErrorCode("403", _K.REFUSED, _NOT_ROOT, _SOURCE, r"violates PodSecurity", Scope.REGION),
        ErrorCode(
            "403",
            _K.REFUSED,
            "no policy of the cluster admits the Pod: correct kubernetes.pod (docs/howto/company-cluster.md)",
            _SOURCE,
            r"unable to validate against any (pod security policy|security context constraint)",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.TRANSIENT,
            "the namespace is new, or is being deleted",
            _SOURCE,
            r"because it is being terminated|serviceaccount \"default\" not found|status unknown for quota",
            retry_s=10.0,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "correct service_account in config.yaml, or serviceAccountName in kubernetes.pod, or make it",
            _SOURCE,
            r"error looking up service account",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "correct priority_class in config.yaml, or priorityClassName in kubernetes.pod: `kubectl get priorityclasses` lists them",
            _SOURCE,
            r"no PriorityClass with name",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "correct runtime_class in config.yaml, or runtimeClassName in kubernetes.pod: `kubectl get runtimeclasses` lists them",
            _SOURCE,
            r"RuntimeClass .* not found",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.AUTH,
            "who grants a right must hold it: have the Roles applied by a person who does",
            _SOURCE,
            ESCALATION,
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "the cluster's admission does not allow such an object",
            _SOURCE,
            r"is forbidden: (?!user \")",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.AUTH,
            "`serve check --policy kubernetes` prints a role with every permission",
            _SOURCE,
            scope=Scope.REGION,
        ),
        ErrorCode("401", _K.AUTH, "log in to the cluster again", _SOURCE, scope=Scope.REGION),
        ErrorCode("404", _K.REFUSED, "make the namespace first", _SOURCE, r"namespaces? ", Scope.REGION),
        ErrorCode("409", _K.TRANSIENT, "it changed meanwhile", _SOURCE),
        ErrorCode(
            "400 405 406 413 415 422", _K.REFUSED, "the cluster does not accept such an object", _SOURCE
        ),
        ErrorCode("404", _K.REFUSED, "the cluster does not have it", _SOURCE, scope=Scope.REGION),
        ErrorCode(
            "500",
            _K.TRANSIENT,
            "a webhook of the cluster does not respond: its owner must start it",
            _SOURCE,
            r"failed calling webhook",
            retry_s=10.0,
        ),
        ErrorCode("429 500 502 503 504", _K.TRANSIENT, "the API is busy or not available", _SOURCE),
    )
)


def error_of(
    status: int, body: str | bytes | None, zone: Zone | None = None, retry_after: str | None = None
) -> ProvisionError:
    """Return our error for a response. `retry_after` is the header."""
    reason, message, details = _status_of(body)
    row = TABLE.find(str(status), message, None)
    kind = _K.TRANSIENT if row is None and status >= 500 else _K.REFUSED if row is None else row.kind
    sentence = message or f"the Kubernetes API answered {status}"
    lacking = not_held(message) if re.search(ESCALATION, message) else []
    if lacking:
        sentence = f"{message.partition(':')[0]}: you do not hold what it grants: {'; '.join(lacking)}"
    if row is not None and (row.kind is not _K.TRANSIENT or "webhook" in row.advice):
        sentence = f"{sentence}; {row.advice}"
    wait_s = RETRY_S if row is None or row.retry_s is None else row.retry_s
    asked = retry_after or details.get("retryAfterSeconds")
    if asked is not None and re.fullmatch(r"\d+(\.\d+)?", str(asked)):
        wait_s = min(float(asked), _MOST_RETRY_S)
    return error_for(
        kind,
        sentence,
        cloud=CLOUD,
        code=reason or str(status),
        zone=zone,
        scope=None if row is None else row.scope,
        retry_after_s=wait_s,
    )


def said_by_server(message: str) -> str:
    """Return the message of one of our errors without the advice, which is about Pods of replicas."""
    advice = next((row.advice for row in TABLE.rows if message.endswith(f"; {row.advice}")), None)
    return message if advice is None else message.removesuffix(f"; {advice}")


def wanted_limits(message: str) -> frozenset[str]:
    """Return the resources of which a ResourceQuota wants limits, by its refusal: ``must specify limits.cpu for: main``."""
    _, found, wanted = message.partition("must specify ")
    return frozenset(re.findall(r"\blimits\.([a-z][a-z0-9./-]*)", wanted)) if found else frozenset()


def not_held(message: str) -> list[str]:
    """Return the rights that a refused Role grants and its author lacks: ``create, delete pods``."""
    found = []
    for rule in re.findall(r"\{(APIGroups:[^}]*)\}", message):
        lists = {
            key: re.findall(r'"([^"]*)"', inner) for key, inner in re.findall(r"(\w+):\[([^\]]*)\]", rule)
        }
        groups = [one for one in lists.get("APIGroups", ()) if one]
        names = [".".join([one, *groups[:1]]) for one in lists.get("Resources", ())]
        found.append(f"{', '.join(lists.get('Verbs', ()))} {', '.join(names)}")
    return found


def unreachable(region: str, error: Exception, zone: Zone | None = None) -> TransientError:
    """Return the error for a cluster that does not respond."""
    why = " ".join(str(getattr(error, "reason", None) or error).split()) or type(error).__name__
    return TransientError(
        f"the cluster {region} does not respond: {why[:300]}",
        cloud=CLOUD,
        code="unreachable",
        zone=zone,
        retry_after_s=RETRY_S,
    )


def _status_of(body: str | bytes | None) -> tuple[str, str, dict[str, Any]]:
    """Return the reason, the sentence and the details of a `Status`; a proxy in between may have sent anything."""
    try:
        found = json.loads(body or "")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
        return "", " ".join(text.split())[:300], {}
    details = found.get("details")
    return (
        str(found.get("reason") or ""),
        str(found.get("message") or ""),
        details if isinstance(details, dict) else {},
    )
