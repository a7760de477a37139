"""`ServiceSpec` <-> JSON, for the database and the wire. Secret values are not in a spec, so never in its JSON."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from skyserve_cli.spec.model import ServiceSpec

_SPEC = TypeAdapter(ServiceSpec)


def spec_to_json(spec: ServiceSpec) -> dict[str, Any]:
    """Return every field, defaults included: a stored spec keeps its meaning when a default changes."""
    document: dict[str, Any] = _SPEC.dump_python(spec, mode="json")
    return document


def spec_from_json(document: Mapping[str, Any]) -> ServiceSpec:
    """Return the inverse.

    Fields it lacks take their default and unknown ones are skipped, so that a program of another age can read it. Raises
    ValueError if a field does not fit.
    """
    return _SPEC.validate_python(dict(document))
