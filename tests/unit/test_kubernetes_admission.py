"""What the sentences of admission and of authorization mean: a truth table with the sentences as servers write them."""

from __future__ import annotations

import json

import pytest

from policies.model import FailureKind as K
from policies.model import Scope
from provisioners.kubernetes.errors import error_of, not_held, wanted_limits

GRANT = (
    'roles.rbac.authorization.k8s.io "skyserve" is forbidden: user "ada" (groups=["dev" "system:authenticated"]) is attempting to '
    'grant RBAC permissions not currently held:\n{APIGroups:[""], Resources:["pods"], Verbs:["create" "delete"]}\n'
    '{APIGroups:["apps"], Resources:["deployments"], Verbs:["update"]}'
)
SECURITY = (
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "main" must set '
    'securityContext.allowPrivilegeEscalation=false), runAsNonRoot != true (pod or container "main" must set '
    "securityContext.runAsNonRoot=true)"
)
AWAY = 'Internal error occurred: failed calling webhook "w.example.com": failed to call webhook: Post "https://w.a.svc:443/x?timeout=10s": '

REFUSALS = [
    # ResourceQuota
    (
        403,
        'pods "x" is forbidden: exceeded quota: q, requested: limits.cpu=4, used: limits.cpu=8, limited: limits.cpu=8',
        K.QUOTA,
        "ask for a larger ResourceQuota",
    ),
    (
        403,
        'secrets "x" is forbidden: exceeded quota: q, requested: secrets=1, used: secrets=1, limited: secrets=1',
        K.QUOTA,
        "",
    ),
    (
        403,
        'pods "x" is forbidden: insufficient quota to match these scopes: [{PriorityClass In [high]}]',
        K.QUOTA,
        "",
    ),
    (
        403,
        'pods "x" is forbidden: failed quota: q: must specify limits.cpu,limits.memory',
        K.REFUSED,
        "limits: {cpu: '4'",
    ),
    (
        403,
        'pods "x" is forbidden: failed quota: q: must specify limits.cpu for: main; requests.storage for: main',
        K.REFUSED,
        "kubernetes.pod",
    ),
    (403, 'pods "x" is forbidden: status unknown for quota: q, resources: pods', K.TRANSIENT, ""),
    (
        403,
        'pods is forbidden: User "system:serviceaccount:ml:skyserve" cannot list resource "pods" in API group "" in the namespace '
        '"ml": RBAC: [role.rbac.authorization.k8s.io "skyserve" not found, role.rbac.authorization.k8s.io "agents" not found]',
        K.TRANSIENT,
        "",
    ),
    (
        409,
        'Operation cannot be fulfilled on resourcequotas "q": the object has been modified',
        K.TRANSIENT,
        "",
    ),
    (500, "Internal error occurred: resource quota evaluation timed out", K.TRANSIENT, ""),
    # LimitRange
    (
        403,
        'pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 16G',
        K.REFUSED,
        "LimitRange",
    ),
    (
        403,
        'pods "x" is forbidden: [minimum cpu usage per Container is 100m, but request is 10m, maximum nvidia.com/gpu usage per Pod is 1, '
        "but limit is 2]",
        K.REFUSED,
        "LimitRange",
    ),
    (
        403,
        'pods "x" is forbidden: cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000',
        K.REFUSED,
        "LimitRange",
    ),
    (
        422,
        'Pod "x" is invalid: spec.containers[0].resources.requests: Invalid value: "4": must be less than or equal to cpu limit',
        K.REFUSED,
        "LimitRange",
    ),
    (
        422,
        'Pod "x" is invalid: spec.containers[0].resources.requests: Invalid value: "16G": must be less than or equal to memory limit of 1Gi',
        K.REFUSED,
        "LimitRange",
    ),
    # policies
    (403, SECURITY, K.REFUSED, "spec: {securityContext: {runAsNonRoot: true, runAsUser: 1000}}"),
    (
        403,
        'pods "x" is forbidden: unable to validate against any security context constraint: [provider "anyuid": ...]',
        K.REFUSED,
        "policy",
    ),
    (
        403,
        'admission webhook "validation.gatekeeper.sh" denied the request: [gpu-limit] no',
        K.REFUSED,
        "a policy of the cluster",
    ),
    (
        400,
        'admission webhook "validate.kyverno.svc-fail" denied the request: \n\nPod/ml/x for resource violation',
        K.REFUSED,
        "policy",
    ),
    (500, 'admission webhook "w" denied the request: no', K.REFUSED, "policy"),
    (
        422,
        "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: failed expression: a",
        K.REFUSED,
        "policy",
    ),
    (403, 'pods "x" is forbidden: an admission plug-in of a vendor says no', K.REFUSED, "admission"),
    # a webhook that is away
    (
        500,
        AWAY + "dial tcp 10.0.0.1:443: connect: connection refused",
        K.TRANSIENT,
        "a webhook of the cluster does not respond",
    ),
    (500, AWAY + "context deadline exceeded", K.TRANSIENT, "a webhook"),
    (500, AWAY + 'service "w" not found', K.TRANSIENT, "a webhook"),
    # names that do not exist
    (
        403,
        'pods "x" is forbidden: error looking up service account ml/nope: serviceaccount "nope" not found',
        K.REFUSED,
        "correct service_account in config.yaml",
    ),
    (
        403,
        'pods "x" is forbidden: error looking up service account ml/default: serviceaccount "default" not found',
        K.TRANSIENT,
        "",
    ),
    (
        403,
        'pods "x" is forbidden: no PriorityClass with name nope was found',
        K.REFUSED,
        "correct priority_class",
    ),
    (
        403,
        'pods "x" is forbidden: pod rejected: RuntimeClass "nope" not found',
        K.REFUSED,
        "correct runtime_class",
    ),
    (404, 'namespaces "x" not found', K.REFUSED, "make the namespace"),
    (403, "unable to create new content in namespace x because it is being terminated", K.TRANSIENT, ""),
    # rights
    (
        403,
        'pods is forbidden: User "ada" cannot create resource "pods" in API group "" in the namespace "ml"',
        K.AUTH,
        "prints a role",
    ),
    (
        403,
        'secrets "x" is forbidden: User "ada" cannot get resource "secrets" in API group "" in the namespace "ml"',
        K.AUTH,
        "prints a role",
    ),
    (
        403,
        'pods is forbidden: User "ada" cannot list resource "pods" in API group "" in the namespace "ml": requires one of '
        '["container.pods.list"] permission(s).',
        K.AUTH,
        "",
    ),
    (403, "", K.AUTH, ""),
    (403, GRANT, K.AUTH, "have the Roles applied by a person who does"),
    (401, "Unauthorized", K.AUTH, "log in"),
]


@pytest.mark.parametrize(("code", "message", "kind", "advice"), REFUSALS)
def test_what_a_sentence_means(code: int, message: str, kind: K, advice: str) -> None:
    body = json.dumps({"kind": "Status", "code": code, "reason": "x", "message": message})
    found = error_of(code, body)
    assert found.kind is kind
    assert advice in found.message
    if kind is not K.TRANSIENT:
        assert found.scope in (Scope.REGION, Scope.TYPE)
    if "webhook" in message:
        assert message in found.message  # which names it


def test_the_rights_that_are_not_held_are_named() -> None:
    assert not_held(GRANT) == ["create, delete pods", "update deployments.apps"]
    found = error_of(403, json.dumps({"reason": "Forbidden", "message": GRANT})).message
    assert found.startswith(
        'roles.rbac.authorization.k8s.io "skyserve" is forbidden: you do not hold what it grants: create, delete pods; '
        "update deployments.apps; "
    )


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("failed quota: q: must specify limits.cpu,limits.memory", {"cpu", "memory"}),
        (
            "failed quota: q: must specify limits.cpu for: files,main; limits.ephemeral-storage for: main",
            {"cpu", "ephemeral-storage"},
        ),
        ("failed quota: q: must specify requests.cpu,memory", set()),
        ("exceeded quota: q, requested: limits.cpu=4", set()),
    ],
)
def test_which_limits_a_quota_wants(message: str, wanted: set[str]) -> None:
    assert wanted_limits(message) == wanted
