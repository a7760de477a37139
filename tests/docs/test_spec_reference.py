"""`reference.yaml` is documentation, example and schema in one: none of the three may drift."""

import re

import jsonschema
import pytest
import yaml

from skyserve_cli.spec import reference_text
from skyserve_cli.spec.editor_schema import json_schema
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.not_yet import NOT_YET

SCHEMA = json_schema()


def keys_of(schema: dict) -> set[str]:
    definitions = [schema, *schema["$defs"].values()]
    return {key for definition in definitions for key in definition.get("properties", {})}


def test_the_reference_is_right() -> None:
    spec = load_text(reference_text()).spec
    assert spec.name == "llama"
    assert len(spec.resources) == 8


def test_the_reference_answers_to_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(reference_text()), SCHEMA)


@pytest.mark.parametrize("key", sorted(keys_of(SCHEMA)))
def test_every_key_is_in_the_reference(key: str) -> None:
    assert re.search(rf"(?<![\w]){key}:", reference_text())


@pytest.mark.parametrize("definition", sorted(SCHEMA["$defs"]))
def test_every_key_has_a_description_for_editors(definition: str) -> None:
    properties = SCHEMA["$defs"][definition].get("properties", {})
    assert [key for key, field in properties.items() if not field.get("description")] == []


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.path)
def test_every_row_of_what_is_not_acted_on_names_a_key(row) -> None:
    assert row.path.removesuffix(".*").rpartition(".")[2] in keys_of(SCHEMA)


WRONG = {
    "an unknown key": "service: {replica: 1}\nrun: x",
    "a missing service": "run: x",
    "a word for a number": "service: {replicas: many}\nrun: x",
    "a policy nobody wrote": "service: {load_balancing_policy: best}\nrun: x",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_the_schema_refuses_in_the_editor_what_we_refuse(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_the_schema_lets_a_variable_stand_for_a_number() -> None:
    jsonschema.validate(yaml.safe_load("service: {replicas: $N, readiness_probe: /health}\nrun: x"), SCHEMA)
