"""The JSON Schema of a service file, for editors and the reference. Only this reads the texts below the keys of sections."""

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from skyserve_cli.spec.schema import ServiceFile
from skyserve_cli.spec.section import Section


class _ForEditors(GenerateJsonSchema):
    """Describes each key by its docstring, and allows ``replicas: $N`` for a number, which editors must not underline.

    Pydantic's `use_attribute_docstrings` reads the source of each section in every command that reads a service file.
    """

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        for key, text in attribute_docstrings(schema["cls"]).items():
            described.get("properties", {}).get(key, {}).setdefault("description", text)
        return described

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return {"anyOf": [super().int_schema(schema), {"type": "string", "pattern": r"^\$"}]}

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"type": "string", "pattern": r"^\$"}]}


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the string literals below the attributes of the class and of its bases, by attribute."""
    found: dict[str, str] = {}
    for base in cls.__mro__[::-1]:
        if not issubclass(base, Section):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(base)))
        statements = [each for node in source.body if isinstance(node, ast.ClassDef) for each in node.body]
        for attribute, after in pairwise(statements):
            match attribute, after:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[key] = inspect.cleandoc(text)
    return found


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a service file, for editors."""
    schema = ServiceFile.model_json_schema(schema_generator=_ForEditors)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SkyServe service file",
        **{key: value for key, value in schema.items() if key != "title"},
        "required": ["service", "run"],
    }
