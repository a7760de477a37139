"""A patch laid over a Pod: Kubernetes' strategic merge, with what the product needs to keep. Pure.

Mappings are merged key by key, and a null removes a key. Lists whose items have a merge key (`pod_schema.merge_key`: containers, volumes
and variables by their name, mounts by their path, ports by their number) are merged item by item; other lists are replaced.
`$patch: replace` in a mapping or as an item of a list puts the patch in place of what was there, `$patch: delete` removes it.

It differs from `kubectl patch` where the product decides on the nodes, or where a merge would never be valid:

* a volume and a variable of the same name are replaced whole, because a merge of two sources is refused by every server;
* tolerations are added to those that the node of the offer needs;
* each term of a required node affinity is combined with ours, so that a Pod stays in the zone that was chosen for it; preferred terms are
  added.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from provisioners.kubernetes.pod_schema import DIRECTIVE, keys_of, merge_key

Json = dict[str, Any]

_WHOLE = ("Volume", "EnvVar")
_ADDED = ("tolerations", "preferredDuringSchedulingIgnoredDuringExecution")
_TERMS = "nodeSelectorTerms"


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], kind: str = "Pod") -> Json:
    """Return the object with the patch over it. Neither is changed."""
    if patch.get(DIRECTIVE) == "replace":
        return merged({}, {key: value for key, value in patch.items() if key != DIRECTIVE}, kind)
    known = keys_of(kind) if kind[:1].isupper() else {}
    found = copy.deepcopy(dict(base))
    for key, value in patch.items():
        if value is None or (isinstance(value, Mapping) and value.get(DIRECTIVE) == "delete"):
            found.pop(key, None)
        elif isinstance(value, list):
            found[key] = _list(found.get(key) or [], value, known.get(key, "[any]")[1:-1], key)
        elif isinstance(value, Mapping):
            found[key] = merged(found.get(key) or {}, value, known.get(key, "any"))
        else:
            found[key] = value
    return found


def _list(base: Sequence[Any], patch: Sequence[Any], kind: str, key: str) -> list[Any]:
    items = [one for one in patch if one != {DIRECTIVE: "replace"}]
    if len(items) != len(patch):
        base = []
    name = merge_key(kind)
    if name:
        return _by_name(base, items, kind, name)
    made = [_plain(one, kind) for one in items]
    if key == _TERMS and base:
        return [_both(ours, theirs) for ours in base for theirs in made]
    if key in _ADDED:
        return [*copy.deepcopy(list(base)), *(one for one in made if one not in base)]
    return made


def _by_name(base: Sequence[Any], patch: Sequence[Any], kind: str, name: str) -> list[Any]:
    found = {one[name]: copy.deepcopy(one) for one in base}
    for item in patch:
        key = item[name]
        if item.get(DIRECTIVE) == "delete":
            found.pop(key, None)
        elif key not in found or kind in _WHOLE:
            found[key] = _plain(item, kind)
        else:
            found[key] = merged(found[key], item, kind)
    return list(found.values())


def _plain(value: Any, kind: str) -> Any:
    """Return what a patch makes where there is nothing: itself, without its nulls and directives."""
    return merged({}, value, kind) if isinstance(value, Mapping) else copy.deepcopy(value)


def _both(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Json:
    """Return a term that holds where both do."""
    keys = ("matchExpressions", "matchFields")
    return {
        key: [*(ours.get(key) or ()), *(theirs.get(key) or ())]
        for key in keys
        if key in ours or key in theirs
    }


def laid_over(first: Mapping[str, Any], then: Mapping[str, Any], kind: str = "Pod") -> Json:
    """Return one patch that does what the first does and then the second. Nulls and directives are kept."""
    known = keys_of(kind) if kind[:1].isupper() else {}
    found = copy.deepcopy(dict(first))
    for key, value in then.items():
        inner, before = known.get(key, "any"), found.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and DIRECTIVE not in value:
            found[key] = laid_over(before, value, inner)
        elif isinstance(value, list) and isinstance(before, list) and {DIRECTIVE: "replace"} not in value:
            found[key] = _lists_over(before, value, inner[1:-1], key)
        else:
            found[key] = copy.deepcopy(value)
    return found


def _lists_over(first: Sequence[Any], then: Sequence[Any], kind: str, key: str) -> list[Any]:
    name = merge_key(kind)
    if not name:
        return [*first, *(one for one in then if one not in first)] if key in _ADDED else list(then)
    found = {one.get(name): one for one in first}
    for one in then:
        before = found.get(one[name])
        is_merged = before is not None and DIRECTIVE not in one and kind not in _WHOLE
        found[one[name]] = laid_over(before or {}, one, kind) if is_merged else copy.deepcopy(one)
    return list(found.values())
