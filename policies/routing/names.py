"""The names of the routing policies, as YAML and command lines spell them. Their classes are in `registry`."""

from __future__ import annotations

NAMES = (
    "cache_aware",
    "consistent_hash",
    "gorgo",
    "instance_aware_least_load",
    "least_load",
    "power_of_two",
    "prefix_tree",
    "round_robin",
)

# Policies of earlier releases, and what a service that names one has now.
RETIRED = {"preserve": "gorgo"}

DEFAULT_POLICY = "least_load"  # of an agent without configuration
# What services get unless they choose: the shortest times to the first token over all of `benchmarks/routing.py`, with
# nearly the best hit rates and the evenest load. Requests without a prompt it sends where the least is in flight.
SERVICE_POLICY = "gorgo"

# Requests of a session are placed by this policy, unless they name another or the service's own goes by sessions as well.
SESSION_POLICY = "consistent_hash"
GO_BY_SESSIONS = frozenset({"consistent_hash", "gorgo"})
