"""The page of the service file, from the JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.reference.text import NOTE, code, table
from skyserve_cli.spec import reference_text
from skyserve_cli.spec.editor_schema import json_schema
from skyserve_cli.spec.not_yet import NOT_YET

_ROOT = "(top level)"
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
)
Schema = Mapping[str, Any]


def page() -> str:
    """Returns the page in Markdown."""
    schema = json_schema()
    parts = [
        NOTE,
        "# Service file\n",
        "Every key of a service file. Unknown keys are errors. `serve validate FILE` checks a file, and `serve validate --schema` "
        "prints the JSON Schema for your editor.\n",
    ]
    for path, section in sections(schema):
        parts.append(f"## `{path}`\n" if path != _ROOT else "## Top level\n")
        if path != _ROOT and section.get("description"):
            parts.append(section["description"] + "\n")
        rows = [
            (code(key), kinds(field, schema), default(field), field.get("description", ""))
            for key, field in section["properties"].items()
        ]
        parts.append(table(["key", "type", "default", "meaning"], rows))
    parts.append("## Keys without effect\n")
    parts.append(
        "The parser knows these keys of SkyPilot and prints a warning, since they have no effect on these clouds.\n"
    )
    unused = [(code(row.path), ", ".join(row.clouds) or "all", row.meanwhile) for row in NOT_YET]
    parts.append(table(["key", "clouds", "what happens instead"], unused))
    parts.append("## Example with every key\n")
    parts.append(f"```yaml\n{reference_text().rstrip()}\n```\n")
    return "\n".join(parts)


def sections(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields the path of every mapping with fixed keys, and its schema; each definition once, where it is first used."""
    seen: set[str] = set()
    waiting: list[tuple[str, Schema]] = [(_ROOT, schema)]
    while waiting:
        path, section = waiting.pop(0)
        yield path, section
        for key, field in section.get("properties", {}).items():
            for name, listed in references(field):
                if name not in seen:
                    seen.add(name)
                    below = key if path == _ROOT else f"{path}.{key}"
                    waiting.append((below + ("[]" if listed else ""), schema["$defs"][name]))


def references(field: Schema, listed: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields the definitions that a field refers to, and whether they are items of a list."""
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2], listed
    for option in field.get("anyOf", ()):
        yield from references(option, listed)
    if isinstance(field.get("items"), Mapping):
        yield from references(field["items"], listed=True)


def kinds(field: Schema, schema: Schema) -> str:
    """Returns what a value may be, as a reader says it."""
    if "$ref" in field:
        target = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return "mapping" if "properties" in target else kinds(target, schema)
    if "anyOf" in field:
        found = [kinds(option, schema) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(filter(None, found)))
    if "enum" in field:
        return ", ".join(code(str(value)) for value in field["enum"] if value is not None)
    if "const" in field:
        return code(str(field["const"]))
    names = field.get("type", "any")
    names = [names] if isinstance(names, str) else [name for name in names if name != "null"]
    if names == ["array"]:
        return f"list of {kinds(field.get('items', {}), schema)}"
    if names == ["object"]:
        return "mapping"
    bounds = [form.format(field[key]) for key, form in _BOUNDS if key in field]
    return " or ".join(names) + (f" ({', '.join(bounds)})" if bounds else "")


def default(field: Schema) -> str:
    """Returns the default, empty if the key has none or its description explains it."""
    value = field.get("default")
    if value in (None, "", [], {}) or (isinstance(value, dict) and "properties" not in field):
        return ""  # the defaults of a mapping are in its own table
    return code(json.dumps(value))
