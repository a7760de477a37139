"""Rows of services, as the store reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.model import Replica
from skyserve_cli.controller.reconcile.planning import new_row
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import ServiceRow

NEW = replace(new_row(ServiceSpec("chat", "serve-it"), 0.0), incarnation="abcd", lb_port=30001)


def a_row(*replicas: Replica, **changes: Any) -> ServiceRow:
    """Return the row of a service at version 1, on the port 30001."""
    return replace(NEW, replicas=replicas, **changes)
