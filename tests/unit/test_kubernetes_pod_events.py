"""When events of Pods are read again after the API has refused."""

from __future__ import annotations

from typing import Any

import pytest

from provisioners.kubernetes.pod_events import PodEvents
from provisioners.port.errors import AuthError, ProvisionError, TransientError


class Refusing:
    """An API that refuses, and the Pods that are stuck."""

    def __init__(self, error: ProvisionError) -> None:
        self.error = error
        self.listed = 0

    def list_events(self, uid: str) -> Any:
        self.listed += 1
        raise self.error

    def stuck(self, seconds: float) -> list[Any]:
        return [{"metadata": {"uid": "u"}}]


@pytest.mark.parametrize(
    ("error", "after_s", "listed"),
    [
        (TransientError("busy", cloud="kubernetes"), 1.0, 2),
        (AuthError("no right", cloud="kubernetes"), 1.0, 1),
        (AuthError("no right", cloud="kubernetes"), 601.0, 2),
    ],
)
def test_only_a_missing_right_closes_events_for_a_while(
    error: ProvisionError, after_s: float, listed: int
) -> None:
    now, world = [1000.0], Refusing(error)
    events = PodEvents("east", world, world, lambda: now[0])  # type: ignore[arg-type]
    events.visit()
    now[0] += after_s
    events.visit()
    assert world.listed == listed
