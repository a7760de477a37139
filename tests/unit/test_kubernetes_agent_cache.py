"""What the watches of load balancer agents leave in their cache, in whatever order they report."""

from __future__ import annotations

from typing import Any

import pytest

from provisioners.kubernetes.agent_cache import AgentCache
from provisioners.kubernetes.agent_objects import ROLE, ROLE_LABEL
from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.sightings import Instant
from provisioners.port.vm import TOKEN_TAG

TOKEN = "me-chat-1"


def now() -> Instant:
    return Instant(0.0, 1_800_000_000.0)


def deployment(uid: str, version: int) -> dict[str, Any]:
    labels = {TOKEN_TAG: TOKEN, ROLE_LABEL: ROLE}
    return {"metadata": {"name": TOKEN, "uid": uid, "resourceVersion": str(version), "labels": labels}}


@pytest.mark.parametrize(
    ("shown", "kept"),
    [
        pytest.param(("new", 7), "new", id="one that was made after it"),
        pytest.param(("old", 3), "known", id="a late event of one that was there before it"),
    ],
)
def test_another_deployment_of_the_same_name(shown: tuple[str, int], kept: str) -> None:
    cache = AgentCache(Cluster("here"), now, NodeCache(now))
    cache.apply("ADDED", deployment("known", 5))
    cache.apply("MODIFIED", deployment(*shown))
    found = cache.deployment(TOKEN)
    assert found is not None
    assert found["metadata"]["uid"] == kept
