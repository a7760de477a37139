"""The section `cache`: folders that outlive replicas, so that the next one on the same node need not download its model again.

A folder is named by the variable that leads programs to it (`HF_HOME` and others), not by a path: where it is, is the provisioner's
matter, and no service file can name a folder of a node.
"""

import re
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from skyserve_cli.spec.fields import one_of, refuse
from skyserve_cli.spec.section import Section

_KINDS = ("node", "pvc")
_MOST = 8
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_OTHERS = re.compile(r"(SKYSERVE|SKYPILOT)_.*|HOME|PATH|PWD|TMPDIR")


def parse_variables(value: object) -> tuple[str, ...]:
    """Return one name or a list of names -> the names."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not 1 <= len(names) <= _MOST:
        raise refuse(f"must be a list of 1 to {_MOST} names of variables, such as [HF_HOME]", value)
    for index, name in enumerate(names):
        at = () if isinstance(value, str) else (index,)
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            hint = "a folder is named by the variable that leads a program to it; $SKYSERVE_CACHE is what they are in"
            raise refuse("must be a variable in capital letters, and no path", name, at=at, hint=hint)
        if _OTHERS.fullmatch(name):
            raise refuse("belongs to the machine or to us", name, at=at)
    if len(set(names)) < len(names):
        raise refuse("has a name twice", names)
    return tuple(names)


_NAMES = {"type": "string", "pattern": f"^{_VARIABLE.pattern}$"}
Variables = Annotated[
    tuple[str, ...],
    PlainValidator(parse_variables),
    WithJsonSchema({"anyOf": [_NAMES, {"type": "array", "items": _NAMES, "minItems": 1, "maxItems": _MOST}]}),
]
Kind = Annotated[
    str, PlainValidator(one_of(*_KINDS)), WithJsonSchema({"type": "string", "enum": list(_KINDS)})
]
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def parse_claim(value: object) -> str:
    if not isinstance(value, str) or not _CLAIM.fullmatch(value):
        raise refuse("must be the name of a PersistentVolumeClaim", value)
    return value


ClaimName = Annotated[
    str, PlainValidator(parse_claim), WithJsonSchema({"type": "string", "pattern": f"^{_CLAIM.pattern}$"})
]


class CacheSection(Section):
    kind: Kind
    """node: a folder of the node or host. pvc: a PersistentVolumeClaim of Kubernetes."""
    claim: ClaimName | None = None
    """With pvc: the name of the claim. It must let several nodes write (ReadWriteMany)."""
    variables: Variables = ("HF_HOME",)
    """Variables that are set to a folder each. Default: HF_HOME, where Hugging Face's libraries keep models."""
