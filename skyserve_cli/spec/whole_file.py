"""The check of a whole service file: the one way that whatever becomes a service goes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyserve_cli.spec.candidates import ParsedAlternatives, expand
from skyserve_cli.spec.check import Sound, check
from skyserve_cli.spec.keys import Keys, digests
from skyserve_cli.spec.problems import Problem, shown
from skyserve_cli.spec.rules import problems as rule_problems
from skyserve_cli.spec.rules import spot_knob
from skyserve_cli.spec.schema import ServiceFile
from skyserve_cli.spec.variables import Variables

# SkyPilot's rule for the names of services and clusters, in either case.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Checked:
    """A tree that was checked. `file` None: nothing sensible is left."""

    file: ServiceFile | None
    candidates: ParsedAlternatives
    keys: Keys
    problems: list[Problem]
    sound: Sound


def checked_file(tree: dict[str, Any], variables: Variables, environ: Mapping[str, str]) -> Checked:
    """Return what the tree of a service file says, and every problem in it but those of `variables`.

    Whatever becomes a service goes through here: a file on its way to the controller, and a spec that the controller is sent.
    """
    file, problems, sound = check(tree)
    if file is None:
        return Checked(None, ParsedAlternatives(), Keys(), problems, sound)
    candidates = expand(file.resources, spot_knob(file.service.replica_policy if file.service else None))
    problems += candidates.problems
    problems += rule_problems(file, candidates, sound)
    keys = digests(file.service, variables, environ, sound)
    problems += keys.problems
    return Checked(file, candidates, keys, problems, sound)


def service_name(name: str, checked: Checked, problems: list[Problem]) -> str:
    """Return the name; add a problem if it is none."""
    if not NAME.fullmatch(name) and checked.sound("name"):
        rule = "must be letters, digits and dashes, begin with a letter, and have at most 63 characters"
        problems.append(Problem("name", f"{rule} (got {shown(name)})", name))
    return name
