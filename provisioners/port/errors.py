"""Provisioning errors, by what the caller does next.

* ProvisionError
  x CapacityError        another zone, now; teaches placement (with a time to live)
  x QuotaError           leave that region and capacity type alone until `retry_at`; the message names the quota
  x AuthError            stop using what was refused; the message names the missing permission or credential
    x RegionClosedError  the whole region is not open to us (a policy, or not enabled): leave it out until a person acted
  x RefusedError         not there, for an hour: other zones, types and regions may take the order; fail the service
                         version once all offers were refused
  x InvalidRequestError  the order is wrong wherever it is sent: fail the service version, do not retry
  x TransientError       same order, same token, after `retry_after_s`; bounded

`scope` is what a refusal is about (an offer, a type, a zone, a region, the cloud), where that is not the usual of its class.
What a cloud refuses for a reason that is not known is a RefusedError: only a certain failure everywhere is an
InvalidRequestError.

Raise them `from` the SDK's exception. Anything else that escapes a provisioner is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.model import FailureKind, Scope, Zone


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a cloud terminated what it had accepted: the same that the error would have said, had it been refused at once."""

    kind: FailureKind
    scope: Scope | None = None


class ProvisionError(Exception):
    """Base of all. `cloud` and vendor `code` are for people; callers look at the class and `scope` only.

    `retry_at` (UNIX seconds) is of quotas, `retry_after_s` of what is transient.
    """

    kind: FailureKind

    def __init__(
        self,
        message: str,
        *,
        cloud: str,
        code: str = "",
        zone: Zone | None = None,
        scope: Scope | None = None,
        retry_at: float | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cloud = cloud
        self.code = code
        self.zone = zone
        self.scope = scope
        self.retry_at = retry_at
        self.retry_after_s = retry_after_s

    @property
    def refusal(self) -> Refusal:
        return Refusal(self.kind, self.scope)


class CapacityError(ProvisionError):
    kind = FailureKind.CAPACITY


class QuotaError(ProvisionError):
    kind = FailureKind.QUOTA


class AuthError(ProvisionError):
    kind = FailureKind.AUTH


class RegionClosedError(AuthError):
    """`region` is the cloud's name of it."""

    def __init__(
        self, message: str, *, cloud: str, region: str, code: str = "", zone: Zone | None = None
    ) -> None:
        super().__init__(message, cloud=cloud, code=code, zone=zone, scope=Scope.REGION)
        self.region = region


class RefusedError(ProvisionError):
    kind = FailureKind.REFUSED


class InvalidRequestError(ProvisionError):
    kind = FailureKind.CONFIG


class TransientError(ProvisionError):
    kind = FailureKind.TRANSIENT


def error_for(
    kind: FailureKind,
    message: str,
    *,
    cloud: str,
    code: str,
    zone: Zone | None,
    scope: Scope | None,
    closed_region: str | None = None,
    retry_at: float | None = None,
    retry_after_s: float = 1.0,
) -> ProvisionError:
    """Return the error of that kind. `closed_region`: the region that is not open to us."""
    if closed_region is not None:
        return RegionClosedError(message, cloud=cloud, region=closed_region, code=code, zone=zone)
    return _CLASSES[kind](
        message,
        cloud=cloud,
        code=code,
        zone=zone,
        scope=scope,
        retry_at=retry_at,
        retry_after_s=retry_after_s,
    )


_CLASSES: dict[FailureKind, type[ProvisionError]] = {
    one.kind: one
    for one in (CapacityError, QuotaError, AuthError, RefusedError, InvalidRequestError, TransientError)
}
