"""What server-side apply makes of an object: the fields of the new configuration, without those of the last that it has no more.

Lists whose items have a key in the schema are merged by it; the others are one value.
"""

from __future__ import annotations

import copy
from typing import Any

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("port", "containerPort"),
}


def applied(live: Any, before: Any, wanted: Any, name: str = "") -> Any:
    """Return the live value with `wanted` in place of what `before` had set."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        before = before if isinstance(before, dict) else {}
        kept = {key: value for key, value in live.items() if key in wanted or key not in before}
        merged = {key: applied(live.get(key), before.get(key), value, key) for key, value in wanted.items()}
        return {**kept, **merged}
    if isinstance(live, list) and isinstance(wanted, list) and name in _KEYS:
        own = {_key(one, name): one for one in live}
        old = {_key(one, name): one for one in before or ()}
        merged_items = [applied(own.get(_key(one, name)), old.get(_key(one, name)), one) for one in wanted]
        mine = {_key(one, name) for one in wanted}
        return merged_items + [one for key, one in own.items() if key not in mine and key not in old]
    return copy.deepcopy(wanted)


def _key(item: Any, name: str) -> Any:
    return next((item[key] for key in _KEYS[name] if key in item), None)
