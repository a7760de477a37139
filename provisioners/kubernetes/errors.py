"""What a refusal of the Kubernetes API means. Pure.

The API answers with a `Status`: an HTTP code, a reason and a sentence. The reason `Forbidden` alone covers permissions, quotas,
limits and admission, so the sentence decides between them (`Status` in k8s.io/apimachinery, messages of the admission plug-ins
ResourceQuota, LimitRanger and PodSecurity).
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

TABLE = ErrorTable(
    (
        ErrorCode(
            "403",
            _K.QUOTA,
            "ask for a larger ResourceQuota, or use another namespace",
            _SOURCE,
            r"exceeded quota",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "the namespace's LimitRange does not allow such a Pod",
            _SOURCE,
            r"(minimum|maximum) (cpu|memory|\S+) usage per|limit to request ratio",
            Scope.TYPE,
        ),
        ErrorCode(
            "403",
            _K.REFUSED,
            "the namespace's policies do not allow such a Pod",
            _SOURCE,
            r"violates PodSecurity|admission webhook|is forbidden: no PriorityClass|ValidatingAdmissionPolicy",
            Scope.REGION,
        ),
        ErrorCode(
            "403",
            _K.TRANSIENT,
            "the namespace is being deleted, or a service account is being made",
            _SOURCE,
            r"because it is being terminated|error looking up service account",
            retry_s=10.0,
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
    if row is not None and row.kind is not _K.TRANSIENT:
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


def unreachable(region: str, error: Exception, zone: Zone | None = None) -> TransientError:
    """Return the error for a cluster that does not respond."""
    why = str(getattr(error, "reason", None) or error) or type(error).__name__
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
