"""``--set replica_policy.num_overprovision=3``: a change to the file's tree before it is checked."""

import re
from collections.abc import Sequence
from typing import Any

from skyserve_cli.spec.problems import Loc, Problem, SpecError, dotted, shown
from skyserve_cli.spec.schema import ServiceFile
from skyserve_cli.spec.yaml_tree import read_value

_WORD, _INDEX, _QUOTED = r"([^.=\[\]]+)", r"\[([0-9]{1,4})\]", r"\[\"([^\"]+)\"\]"
# A word is separated by a dot, always: with an optional one this could be read in exponentially many ways.
_PATH = re.compile(rf"{_WORD}(?:\.{_WORD}|{_INDEX}|{_QUOTED})*")
_STEP = re.compile(f"{_INDEX}|{_QUOTED}|{_WORD}")


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each ``path=value`` into `tree`; the value is read as YAML.

    A path that starts with a key of the whole file (``resources.accelerators``) is taken from the top, any other
    (``replica_policy.max_replicas``) from `service`. In a file that says `replicas: N`, a key of `replica_policy`
    turns that into its longer form, `min_replicas: N`: the two may not stand side by side, and a user who sets
    the one means to drop the other. `readiness_probe: /health` becomes `path: /health` in the same way.
    """
    problems: list[Problem] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not _PATH.fullmatch(path.strip()):
            problems.append(Problem("", f"--set takes PATH=VALUE (got {shown(override)})", override))
            continue
        loc = _loc(path.strip())
        try:
            value = read_value(text, loc)
        except SpecError as error:
            problems.extend(Problem(dotted(loc), f"--set: {each}") for each in error.problems)
            continue
        if loc[:2] == ("service", "replica_policy"):
            _lengthen(tree.get("service"))
        if loc[:2] == ("service", "readiness_probe") and len(loc) > 2:
            _lengthen_probe(tree.get("service"))
        obstacle = _write(tree, loc, value)
        if obstacle is not None:
            problems.append(Problem(dotted(loc), f"--set cannot reach it: {obstacle}"))
    return problems


def _loc(path: str) -> Loc:
    steps = tuple(int(match[1]) if match[1] else match[2] or match[3] for match in _STEP.finditer(path))
    return steps if steps[0] in ServiceFile.model_fields else ("service", *steps)


def _lengthen(service: object) -> None:
    """`replicas: N` as `replica_policy: {min_replicas: N}`."""
    if isinstance(service, dict) and service.get("replica_policy") is None:
        replicas = service.pop("replicas", None)
        if replicas is not None:
            service["replica_policy"] = {"min_replicas": replicas}


def _lengthen_probe(service: object) -> None:
    """`readiness_probe: /health` as `readiness_probe: {path: /health}`."""
    if isinstance(service, dict) and isinstance(service.get("readiness_probe"), str):
        service["readiness_probe"] = {"path": service["readiness_probe"]}


def _write(tree: Any, loc: Loc, value: object) -> str | None:
    """None, or why there is no such place. Mappings on the way are made if they are missing."""
    *way, last = loc
    for depth, step in enumerate(way):
        if isinstance(step, int):
            if not isinstance(tree, list) or step >= len(tree):
                return f"{dotted(loc[: depth + 1])} is not there"
            tree = tree[step]
        elif isinstance(tree, dict):
            if tree.get(step) is None:
                if any(isinstance(later, int) for later in loc[depth + 1 :]):
                    return f"{dotted(loc[: depth + 1])} is not there"
                tree[step] = {}
            tree = tree[step]
        else:
            break
    if isinstance(last, str) and isinstance(tree, dict):
        tree[last] = value
        return None
    if isinstance(last, int) and isinstance(tree, list) and last < len(tree):
        tree[last] = value
        return None
    return f"{dotted(loc[:-1])} is not a {'list that long' if isinstance(last, int) else 'mapping'}"
