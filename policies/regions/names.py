"""The names of the region policies, as YAML and command lines spell them. Their classes are in `registry`."""

from __future__ import annotations

REGION_NAMES = ("gorgo", "local", "one_cost", "skywalker")

DEFAULT_REGION_POLICY = "one_cost"
