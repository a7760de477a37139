"""Provisioning errors, by what the caller does next.

* ProvisionError
  x CapacityError        another zone, now; teaches placement (with a time to live)
  x QuotaError           leave that region and capacity type alone until `retry_at`; the message names the quota
  x AuthError            stop using that cloud; the message names the missing permission or credential
  x InvalidRequestError  the order itself is wrong: fail the service version, do not retry
  x TransientError       same order, same token, after `retry_after_s`; bounded

Raise them `from` the SDK's exception. Anything else that escapes a provisioner is a bug.
"""

from __future__ import annotations

from policies.model import FailureKind, Zone


class ProvisionError(Exception):
    """Base of all. `cloud` and vendor `code` are for people; callers look at the class only."""

    kind: FailureKind

    def __init__(self, message: str, *, cloud: str, code: str = "", zone: Zone | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cloud = cloud
        self.code = code
        self.zone = zone


class CapacityError(ProvisionError):
    kind = FailureKind.CAPACITY


class QuotaError(ProvisionError):
    kind = FailureKind.QUOTA

    def __init__(
        self,
        message: str,
        *,
        cloud: str,
        code: str = "",
        zone: Zone | None = None,
        retry_at: float | None = None,
    ) -> None:
        super().__init__(message, cloud=cloud, code=code, zone=zone)
        self.retry_at = retry_at


class AuthError(ProvisionError):
    kind = FailureKind.AUTH


class InvalidRequestError(ProvisionError):
    kind = FailureKind.CONFIG


class TransientError(ProvisionError):
    kind = FailureKind.TRANSIENT

    def __init__(
        self,
        message: str,
        *,
        cloud: str,
        code: str = "",
        zone: Zone | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, cloud=cloud, code=code, zone=zone)
        self.retry_after_s = retry_after_s
