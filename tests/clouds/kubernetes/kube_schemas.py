"""The schemas of Kubernetes' own OpenAPI document, as `kubernetes-validate` carries them: unknown fields are wrong. They are read
once; the package reads megabytes for every object."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema.validators import Draft202012Validator
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

VERSION = "1.30"


class Invalid(Exception):
    """The object is none of its kind; the message has the path."""


def check(item: dict[str, Any]) -> None:
    """Raise Invalid unless the object passes the schema of its kind."""
    validator = _validator(item["apiVersion"], item["kind"])
    wrong = next(validator.iter_errors(item), None)
    if wrong is not None:
        raise Invalid(f"{'.'.join(map(str, wrong.absolute_path))}: {wrong.message[:300]}")


@cache
def _definitions() -> tuple[str, Registry[Any]]:
    version = next(one for one in reversed(all_versions()) if one.startswith(VERSION))
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    definitions = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    return folder, definitions @ Registry()


@cache
def _validator(api_version: str, kind: str) -> Draft202012Validator:
    folder, registry = _definitions()
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0] + '-' if group else ''}{version}"
    schema = schema_contents(f"{folder}/{name}.json", VERSION)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry)
