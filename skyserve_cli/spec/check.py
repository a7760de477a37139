"""A tree against the schema: a checked `ServiceFile`, and every problem in the words of the user's file."""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from skyserve_cli.spec.problems import Loc, Problem, did_you_mean, dotted, shown
from skyserve_cli.spec.schema import ServiceFile
from skyserve_cli.spec.section import Section

# Pydantic's error types in our words; `{}` takes the bound from the error's context.
_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "greater_than": "must be above {gt:.12g}",
        "greater_than_equal": "must be at least {ge:.12g}",
        "less_than_equal": "must be at most {le:.12g}",
        "int_type": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_parsing_size": "must be a whole number of a reasonable size",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "float_parsing": "must be a number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "string_type": "must be text",
        "string_too_short": "must not be empty",
        "too_short": "must not be empty",
        "string_too_long": "must have at most {max_length:,} characters",
        "enum": "must be one of {expected}",
        "missing": "is required here",
        "tuple_type": "must be a list",
        "dict_type": "must be a mapping",
        "dataclass_type": "must be a mapping",
        "model_type": "must be a mapping",
        "model_attributes_type": "must be a mapping",
        "list_type": "must be a list",
    }
)


# Values that are often credentials are neither quoted nor handed on.
_PRIVATE: tuple[Loc, ...] = (
    ("secrets",),
    ("service", "readiness_probe", "headers"),
    ("service", "load_balancer", "api_keys"),
)


class Sound:
    """Which parts of the file are beyond doubt.

    Rules between keys look only at these, so that one mistake does not lead to a second, mistaken complaint.
    """

    def __init__(self, wrong: frozenset[Loc]) -> None:
        self._wrong = wrong

    def __call__(self, *keys: str) -> bool:
        """Return whether nothing at, above or below the key is wrong."""
        return not any(wrong[: len(keys)] == keys[: len(wrong)] for wrong in self._wrong)

    def everywhere(self, key: str) -> bool:
        """Return whether no key of this name is wrong, in whichever section."""
        return not any(key in wrong for wrong in self._wrong)


def check(tree: dict[str, Any]) -> tuple[ServiceFile | None, list[Problem], Sound]:
    """Set problems aside, so that the rules between keys can still look at the rest.

    The file is None only if nothing sensible is left.
    """
    problems: list[Problem] = []
    wrong: set[Loc] = set()
    left = tree
    # Setting a value aside can bring up another one (a union reports each member), but not for ever.
    for _ in range(4):
        try:
            return ServiceFile.model_validate(left), problems, Sound(frozenset(wrong))
        except ValidationError as error:
            left = copy.deepcopy(left)
            for detail in error.errors(include_url=False):
                loc = _user_loc(detail["loc"], tree)
                if not any(loc[:length] in wrong for length in range(len(loc) + 1)):
                    problems.append(_problem(detail, loc))
                    wrong.add(loc)
                _set_aside(left, loc)
    return None, problems, Sound(frozenset(wrong))


def _user_loc(loc: Loc, tree: Any) -> Loc:
    """Pydantic's location without what it adds for unions.

    Only steps that exist in the file, and the last key (a missing one does not exist).
    """
    path: list[str | int] = []
    for position, part in enumerate(loc):
        inside = (isinstance(tree, dict) and part in tree) or (
            isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        )
        if inside:
            tree = tree[part]
            path.append(part)
        elif position == len(loc) - 1 and isinstance(tree, dict) and isinstance(part, str):
            path.append(part)
    return tuple(path)


def _problem(detail: ErrorDetails, loc: Loc) -> Problem:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    private = any(loc[: len(prefix)] == prefix for prefix in _PRIVATE)
    if kind == "extra_forbidden":
        return _unknown_key(loc, None if private else value)
    if kind == "missing":
        return Problem(dotted(loc), sentence_of(detail))
    if kind == "refused":
        path = dotted((*loc, *context["at"]))
        return Problem(path, context["sentence"], None if private else value, context["hint"])
    if private:
        return Problem(dotted(loc), sentence_of(detail))
    return Problem(dotted(loc), f"{sentence_of(detail)} (got {shown(value)})", value)


def sentence_of(detail: ErrorDetails) -> str:
    """Return what is wrong, without the value."""
    kind, context = detail["type"], detail.get("ctx", {})
    return _SENTENCES[kind].format(**context) if kind in _SENTENCES else detail["msg"]


def _unknown_key(loc: Loc, value: object) -> Problem:
    section = _section(ServiceFile, loc[:-1])
    key = str(loc[-1])
    if key in section.refused:
        return Problem(dotted(loc), section.refused[key], value)
    if key in section.renamed:
        return Problem(dotted(loc), "unknown key", value, f"it is now {section.renamed[key]}")
    hint = did_you_mean(key, section.model_fields) or _elsewhere(key, section)
    return Problem(dotted(loc), "unknown key", value, hint)


def _elsewhere(key: str, section: type[Section]) -> str | None:
    """Return a key that is right in another section is most often a slip of the indentation."""
    homes = [
        path
        for path, other in _sections(ServiceFile, ())
        if key in other.model_fields and other is not section
    ]
    if not homes:
        return None
    return f"it belongs at {dotted((*homes[0], key))}"


def _sections(section: type[Section], loc: Loc) -> Iterator[tuple[Loc, type[Section]]]:
    yield loc, section
    for key, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None and key not in ("any_of", "ordered", "file_mounts"):
            yield from _sections(inner, (*loc, key))


def _section(section: type[Section], loc: Loc) -> type[Section]:
    for part in loc:
        field = section.model_fields.get(part) if isinstance(part, str) else None
        section = (field and _inner(field.annotation)) or section
    return section


def _inner(annotation: object) -> type[Section] | None:
    """Return the section inside ``X``, ``X | None``, ``list[X]`` or ``dict[str, Annotated[X, …]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if issubclass(annotation, Section) else None
    return next(filter(None, map(_inner, get_args(annotation))), None)


def _set_aside(tree: Any, loc: Loc) -> None:
    """Remove the value at `loc`; an item of a list becomes an empty mapping, so that its neighbours keep their place.

    A key that is missing takes the mapping it is missing from along.
    """
    *way, last = loc
    parent, key = None, None
    for part in way:
        if not isinstance(tree, dict | list):
            return
        parent, key = tree, part
        tree = tree.get(part) if isinstance(tree, dict) else tree[part]  # type: ignore[index]
    if isinstance(tree, dict) and last in tree:
        del tree[last]
    elif isinstance(tree, list) and isinstance(last, int) and last < len(tree):
        tree[last] = {}
    elif isinstance(tree, dict) and isinstance(parent, dict) and key is not None:
        parent.pop(key, None)
