"""What all sections of a service file have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Words = Mapping[str, str]


class Section(BaseModel):
    """A mapping of the file. An empty key (``workdir:``) is the same as none."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    refused: ClassVar[Words] = {}
    """Keys of SkyPilot that have no place here, and why."""
    renamed: ClassVar[Words] = {}
    """Keys of SkyServe's earlier branches, and what they are called now."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class Shorthand:
    """The key may also be written in a simpler form: a parser turns that into the section."""

    def __init__(self, schema: JsonSchemaValue) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [self._schema, handler(core)]}


def word_as(key: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)
