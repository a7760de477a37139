"""Two descriptions of what Azure's bodies may contain, which were made independently of each other.

`by_table`: the compact table `azure_types.json` of the mappers of Azure's JavaScript SDK (its source and versions are in the
file; `azure_types.mjs` makes it). It knows fields, kinds, required fields and fields that only Azure may write.
`by_models`: the models of the Python SDK, which know fields and the values of open enumerations.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

from azure.mgmt.compute import models as compute
from azure.mgmt.network import models as network
from azure.mgmt.resource.resources import models as resources

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("azure_types.json").read_text())

TYPES = {
    "microsoft.compute/virtualmachines": ("VirtualMachine", compute.VirtualMachine),
    "microsoft.compute/sshpublickeys": ("SshPublicKeyResource", compute.SshPublicKeyResource),
    "microsoft.compute/disks": ("Disk", compute.Disk),
    "microsoft.network/networksecuritygroups": ("NetworkSecurityGroup", network.NetworkSecurityGroup),
    "microsoft.network/virtualnetworks": ("VirtualNetwork", network.VirtualNetwork),
    "microsoft.network/networkinterfaces": ("NetworkInterface", network.NetworkInterface),
    "microsoft.network/publicipaddresses": ("PublicIPAddress", network.PublicIPAddress),
    "microsoft.resources/resourcegroups": ("ResourceGroup", resources.ResourceGroup),
}

# The SDK's list of sizes is stale, as its documentation admits: any size is allowed.
_OPEN = {"vmSize"}


def request_problems(kind: str, body: Any) -> list[str]:
    """The faults of a body that is sent to make a resource of this kind (provider/type, in lower case)."""
    table_type, model = TYPES[kind]
    return by_table(table_type, body) + by_models(model, body)


def answer_problems(kind: str, body: Any) -> list[str]:
    """The faults of a resource as it is returned."""
    table_type, model = TYPES[kind]
    return by_table(table_type, body, answer=True) + by_models(model, body)


# --- The table --------------------------------------------------------------------------------------------------------


def by_table(type_name: str, body: Any, answer: bool = False) -> list[str]:
    return list(_composite(type_name, body, "$", answer))


@cache
def _tree(type_name: str) -> dict[str, Any]:
    """{"properties": {"primary": "Boolean"}} of {"properties.primary": "Boolean"}."""
    tree: dict[str, Any] = {}
    for path, kind in TABLE["types"][type_name].items():
        node, names = tree, path.split(".")
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = kind
    return tree


def _composite(type_name: str, value: Any, at: str, answer: bool) -> typing.Iterator[str]:
    yield from _fields(_tree(type_name), value, at, answer)


def _fields(tree: dict[str, Any], value: Any, at: str, answer: bool) -> typing.Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: no object"
        return
    for name, inner in value.items():
        if name not in tree:
            yield f"{at}.{name}: unknown"
        elif isinstance(tree[name], dict):
            yield from _fields(tree[name], inner, f"{at}.{name}", answer)
        else:
            yield from _value(tree[name], inner, f"{at}.{name}", answer)
    for name, kind in tree.items():
        if isinstance(kind, str) and kind.endswith("!") and name not in value:
            yield f"{at}.{name}: missing"


def _value(kind: str, value: Any, at: str, answer: bool) -> typing.Iterator[str]:
    if kind.endswith("~"):
        if not answer:
            yield f"{at}: only Azure writes it"
        return
    kind = kind.removesuffix("!")
    if kind.startswith("#"):
        yield from _composite(kind[1:], value, at, answer)
    elif kind.startswith("["):
        if not isinstance(value, list):
            yield f"{at}: no list"
            return
        for index, inner in enumerate(value):
            yield from _value(kind[1:-1], inner, f"{at}[{index}]", answer)
    elif kind.startswith("{"):
        if not isinstance(value, dict):
            yield f"{at}: no object"
            return
        for name, inner in value.items():
            yield from _value(kind[1:-1], inner, f"{at}.{name}", answer)
    elif kind.startswith("Enum("):
        if value not in kind[5:-1].split("|"):
            yield f"{at}: {value!r} is none of {kind[5:-1]}"
    elif not _is_a(kind, value):
        yield f"{at}: {value!r} is no {kind}"


def _is_a(kind: str, value: Any) -> bool:
    match kind:
        case "String" | "Date" | "Uuid" | "TimeSpan":
            return isinstance(value, str)
        case "Boolean":
            return isinstance(value, bool)
        case "Number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    return kind in ("any", "Object")


# --- The SDK's models -------------------------------------------------------------------------------------------------


def by_models(model: type, body: Any) -> list[str]:
    return list(_model(model, body, "$"))


@cache
def _hints(model: type) -> dict[str, Any]:
    """Type of a field by its name on the wire."""
    model.__new__(model)  # the SDK fills in the names of the fields with the first object
    fields = getattr(model, "_attr_to_rest_field", {})
    found = {}
    for base in reversed(model.__mro__):
        family = next(
            (m for m in (compute, network, resources) if base.__module__.startswith(m.__name__)), None
        )
        if family is not None:
            names = {**vars(typing), **vars(__import__(base.__module__, fromlist=["x"])), "_models": family}
            for attribute, annotation in inspect.get_annotations(base).items():
                if attribute in fields:
                    text = annotation if isinstance(annotation, str) else None
                    hint = eval(text, names) if text else annotation  # noqa: S307 (the SDK's own annotations)
                    found[fields[attribute]._rest_name] = _resolved(hint, names)
    return found


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """With the references that are still strings, at any depth, put in the place of their names."""
    if isinstance(hint, typing.ForwardRef | str):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return _resolved(eval(text, names), names)  # noqa: S307 (the SDK's own annotations)
    inner = typing.get_args(hint)
    if not inner:
        return hint
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return hint
    resolved = tuple(_resolved(each, names) for each in inner)
    return reduce(or_, resolved) if origin is typing.Union else origin[resolved]


def _model(model: type, value: Any, at: str) -> typing.Iterator[str]:
    hints = _hints(model)
    if not isinstance(value, dict):
        yield f"{at}: no object"
        return
    for name, inner in value.items():
        if name not in hints:
            yield f"{at}.{name}: no field of {model.__name__}"
        elif name not in _OPEN:
            yield from _hinted(hints[name], inner, f"{at}.{name}")


def _hinted(hint: Any, value: Any, at: str) -> typing.Iterator[str]:
    if isinstance(hint, type) and any(base.__name__ == "Model" for base in hint.__mro__):
        yield from _model(hint, value, at)
        return
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        enums = [each for each in inner if isinstance(each, type) and issubclass(each, enum.Enum)]
        if enums:
            known = {str(each.value).lower() for each in enums[0]}
            if str(value).lower() not in known:
                yield f"{at}: {value!r} is none of {sorted(known)}"
            return
        for each in inner:
            if each is not type(None):
                yield from _hinted(each, value, at)
    elif origin is list and isinstance(value, list):
        for index, each in enumerate(value):
            yield from _hinted(inner[0], each, f"{at}[{index}]")
