"""Variables, secrets, overrides, names, JSON, hashes; and that no text whatsoever gets past `SpecError`."""

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from skyserve_cli.spec import SpecError, reference_text, sent_spec, spec_from_json, spec_to_json
from skyserve_cli.spec.load import Loaded, load_file, load_text
from skyserve_cli.spec.schema import Section
from tests.clouds.schedules import examples

SMALL = "service: {}\nrun: serve\n"
PROBED = """
service:
  readiness_probe:
    path: /v1/$MODEL
    post_data: {model: "${MODEL}", key: "x-$TOKEN"}
    headers: {Authorization: Bearer $TOKEN, X-Version: 2}
  replicas: $N
envs: {MODEL: llama, N: 3}
secrets: {TOKEN: null}
run: serve --model $MODEL --token $TOKEN
"""
SECRET = 'quo"te-hunter2'


def loaded(text: str = PROBED, **options: object) -> Loaded:
    return load_text(text, **{"environ": {"TOKEN": SECRET}, **options})  # type: ignore[arg-type]


# --- variables ---------------------------------------------------------------------------------------------------


def test_variables_are_filled_in_where_they_may_be() -> None:
    spec = loaded().spec
    assert spec.scaling.min_replicas == 3
    assert spec.probe.path == "/v1/llama"
    assert json.loads(spec.probe.post_data or "") == {"model": "llama", "key": "x-$TOKEN"}
    assert spec.run == "serve --model $MODEL --token $TOKEN"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment() -> None:
    text = f"envs: {{A: file, B: file, C: }}\n{SMALL}"
    found = load_text(
        text, env_overrides={"A": "option", "D": "option"}, environ=dict.fromkeys("ABC", "outside")
    )
    assert dict(found.spec.envs) == {"A": "option", "B": "file", "C": "outside", "D": "option"}


def test_variables_are_the_text_that_was_written() -> None:
    text = f"envs: {{A: 0080, B: yes, C: 1e3, D: 2024-01-01, E: 1.0, F: ''}}\n{SMALL}"
    assert [value for _, value in load_text(text).spec.envs] == [
        "0080",
        "yes",
        "1e3",
        "2024-01-01",
        "1.0",
        "",
    ]


REFERENCES = {
    "a name": ("/$A", "/a"),
    "a name in braces": ("/${A}b", "/ab"),
    "a default that is not needed": ("/${A:-x}", "/a"),
    "a default": ("/${X:-x}", "/x"),
    "a default for an empty value": ("/${EMPTY:-x}", "/x"),
    "an empty value": ("/$EMPTY", "/"),
    "a default that does not end": ("/${A:-" + "${A:-" * 1000, "/${A:-" + "${A:-" * 1000),
    "a dollar": ("/$5", "/$5"),
    "a reference inside a value": ("/$REF", "/$A"),
}


@pytest.mark.parametrize(("text", "path"), REFERENCES.values(), ids=REFERENCES.keys())
def test_references(text: str, path: str) -> None:
    envs = "envs: {A: a, EMPTY: '', REF: $A}"
    assert load_text(f"service: {{readiness_probe: '{text}'}}\n{envs}\nrun: x").spec.probe.path == path


def test_a_reference_to_nothing_is_left_and_said() -> None:
    found = load_text("service: {readiness_probe: /$MODLE}\nrun: x")
    assert found.spec.probe.path == "/$MODLE"
    (warning,) = found.warnings
    assert warning.path == "service.readiness_probe"
    assert "$MODLE is neither in envs nor in secrets" in warning.message


def test_a_value_cannot_break_out_of_the_json_it_is_put_in() -> None:
    text = """
    service: {readiness_probe: {path: /, post_data: '{"prompt": "$P", "n": $N}'}}
    envs: {P: 'say "hi"', N: 1}
    run: x
    """
    assert json.loads(load_text(text).spec.probe.post_data or "") == {"prompt": 'say "hi"', "n": 1}


# --- secrets -----------------------------------------------------------------------------------------------------


SOURCES = {
    "from the environment": ("secrets: {TOKEN: null}", {"environ": {"TOKEN": SECRET}}),
    "from the command line": ("secrets: {TOKEN: null}", {"secret_overrides": {"TOKEN": SECRET}}),
    "from the command line alone": ("", {"secret_overrides": {"TOKEN": SECRET}}),
    "from the command line before the file": (
        "secrets: {TOKEN: other}",
        {"secret_overrides": {"TOKEN": SECRET}},
    ),
    "from the file": (f"secrets: {{TOKEN: '{SECRET}'}}", {}),
    "by a list": ("secrets: [TOKEN]", {"environ": {"TOKEN": SECRET}}),
    "by a list of references": ("secrets: ['secrets:TOKEN']", {"environ": {"TOKEN": SECRET}}),
}


@pytest.mark.parametrize(("text", "options"), SOURCES.values(), ids=SOURCES.keys())
def test_where_secrets_come_from(text: str, options: dict[str, dict[str, str]]) -> None:
    found = load_text(f"{text}\n{SMALL}", **options)  # type: ignore[arg-type]
    assert found.spec.secrets == ("TOKEN",)
    assert dict(found.secret_values) == {"TOKEN": SECRET}


def test_the_value_of_a_secret_is_nowhere_but_beside_the_spec() -> None:
    found = loaded()
    for public in (repr(found), repr(found.spec), json.dumps(spec_to_json(found.spec))):
        assert "hunter2" not in public
        assert "TOKEN" in public
    assert found.secret_values["TOKEN"] == SECRET


def test_a_mistake_about_a_secret_does_not_show_it() -> None:
    texts = [
        "secrets: hunter2",
        "secrets: [[hunter2]]",
        "secrets: {A: [hunter2]}",
        "secrets: {9: hunter2}",
        "secrets: {A: hunter2}\nenvs: {A: b}",
        'service: {readiness_probe: {path: /, headers: {X: "hunter2\\n"}}}',
        "service: {readiness_probe: {path: /, headers: hunter2}}",
    ]
    for text in texts:
        with pytest.raises(SpecError) as caught:
            load_text(f"{text}\n{SMALL}" if "service" not in text else f"{text}\nrun: x")
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in repr(caught.value.problems)


def test_the_probe_is_sent_with_its_secrets() -> None:
    found = loaded()
    sent = found.spec.probe.resolved(found.secret_values)
    assert sent.headers == (("Authorization", f"Bearer {SECRET}"), ("X-Version", "2"))
    assert json.loads(sent.post_data or "")["key"] == f"x-{SECRET}"
    assert sent.timeout_s == found.spec.probe.timeout_s


# --- overrides and names -----------------------------------------------------------------------------------------


OVERRIDES = {
    "a key of the service": ("replica_policy.num_overprovision=3", lambda s: s.placement.num_overprovision, 3),
    "the same from the top": ("service.replica_policy.num_overprovision=3", lambda s: s.placement.num_overprovision, 3),
    "a key of resources": ("resources.accelerators=L4:2", lambda s: s.resources[0].accelerator_count, 2.0),
    "an item of a list": ("resources.any_of[1].cloud=gcp", lambda s: s.resources[1].cloud, "gcp"),
    "a variable": ("envs.FLAG=yes", lambda s: dict(s.envs)["FLAG"], "yes"),
    "a value with an equals sign": ("envs.ARGS=--a=b", lambda s: dict(s.envs)["ARGS"], "--a=b"),
    "a boolean": ("replica_policy.dynamic_ondemand_fallback=true", lambda s: s.resources[0].use_spot, True),
    "a list": ("resources.ports=[8080]", lambda s: s.port, 8080),
    "the name": ("name=other", lambda s: s.name, "other"),
}  # fmt: skip


@pytest.mark.parametrize(("override", "read", "value"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_overrides(override: str, read, value: object) -> None:
    text = f"{SMALL}resources: {{any_of: [{{cloud: aws}}, {{cloud: aws, region: x}}]}}"
    assert read(load_text(text, set_overrides=[override]).spec) == value


WRONG_OVERRIDES = {
    "no value": ("replicas", "--set takes PATH=VALUE"),
    "no path": ("=3", "--set takes PATH=VALUE"),
    "an unknown key": ("replicass=3", 'service.replicass: unknown key; did you mean "replicas"?'),
    "a wrong value": ("replicas=-3", "service.replicas: must be at least 0 (got -3)"),
    "a value that is no YAML": ("replicas=[", "service.replicas: --set: not valid YAML"),
    "an item that is not there": (
        "resources.any_of[0].cloud=aws",
        "resources is not there",
    ),
    "a long word with an odd end": (f"{'a' * 5000}]=1", "--set takes PATH=VALUE"),
    "a key inside a word": ("run.x=3", "run is not a mapping"),
}


def test_a_key_of_the_probe_turns_a_plain_path_into_its_longer_form() -> None:
    text = "service: {readiness_probe: /health, replicas: 1}\nrun: serve\n"
    probe = load_text(text, set_overrides=["readiness_probe.initial_delay_seconds=60"]).spec.probe
    assert probe.path == "/health"
    assert load_text(text, set_overrides=["readiness_probe=/ready"]).spec.probe.path == "/ready"


def test_a_policy_key_turns_a_plain_size_into_its_longer_form() -> None:
    text = "service: {replicas: 3}\nrun: serve\n"
    spec = load_text(text, set_overrides=["replica_policy.num_overprovision=2"]).spec
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (3, 3)
    assert spec.placement.num_overprovision == 2
    with pytest.raises(SpecError, match="cannot stand next to replica_policy"):
        load_text(text, set_overrides=["replica_policy.num_overprovision=2", "replicas=3"])


@pytest.mark.parametrize(("override", "piece"), WRONG_OVERRIDES.values(), ids=WRONG_OVERRIDES.keys())
def test_wrong_overrides(override: str, piece: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_text(SMALL, set_overrides=[override])
    assert piece in str(caught.value)


NAMES = {
    "service.yaml": "service",
    "My_LLM.sky.yaml": "my-llm",
    "llama3.1.yml": "llama3-1",
    "7b-chat.yaml": "b-chat",
    "___.yaml": "service",
    f"{'x' * 80}.yaml": "x" * 63,
}


@pytest.mark.parametrize(("file", "name"), NAMES.items(), ids=[*list(NAMES)[:-1], "a long one"])
def test_a_service_without_a_name_is_called_like_its_file(tmp_path, file: str, name: str) -> None:
    path = tmp_path / file
    path.write_text(f"\ufeff{SMALL}", encoding="utf-8")
    assert load_file(path).spec.name == name
    assert load_file(path, name="Given").spec.name == "Given"


def test_the_name_that_is_given_wins_over_the_file_and_is_checked_too() -> None:
    assert load_text(f"name: inside\n{SMALL}").spec.name == "inside"
    assert load_text(f"name: inside\n{SMALL}", name="given").spec.name == "given"
    with pytest.raises(SpecError, match="name: must be letters"):
        load_text(SMALL, name="not good")


# --- JSON and hash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [SMALL, PROBED, reference_text()], ids=["the smallest", "one with secrets", "all keys"]
)
def test_a_spec_survives_json(text: str) -> None:
    spec = loaded(text).spec
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_json_of_another_age_is_read() -> None:
    spec = loaded(SMALL).spec
    document = spec_to_json(spec)
    assert spec_from_json({**document, "a_key_of_the_future": 1}) == spec
    del document["drain_timeout_s"]
    assert spec_from_json(document) == spec
    with pytest.raises(ValueError, match="replica_policy"):
        spec_from_json({**document, "replica_policy": 5})


RESTARTS = {
    "run": "run: other",
    "setup": "setup: other",
    "a variable": "envs: {A: other, B: b}",
    "a secret": "secrets: {T: t, U: u}",
    "the accelerator": "resources: {accelerators: A100, ports: 80}",
    "the market": "resources: {accelerators: L4, ports: 80, use_spot: true}",
    "the port": "resources: {accelerators: L4, ports: 81}",
    "the working directory": "workdir: other",
    "the number of nodes": "num_nodes: 2",
    "a mount": "file_mounts: {/a: b}",
}
KEEPS = {
    "the number of replicas": "service: {replicas: 5}",
    "the probe": "service: {readiness_probe: /other}",
    "the balancing policy": "service: {load_balancing_policy: round_robin}",
    "the drain": "service: {drain_timeout_seconds: 5}",
    "the order of variables": "envs: {B: b, A: a}",
    "the name": "name: other",
}
BASE = {
    "service": {},
    "run": "x",
    "envs": {"A": "a", "B": "b"},
    "secrets": {"T": "t"},
    "resources": {"accelerators": "L4", "ports": 80},
}


def hash_with(change: str) -> str:
    return load_text(yaml.safe_dump({**BASE, **yaml.safe_load(change)}, sort_keys=False)).spec.replica_hash()


@pytest.mark.parametrize("change", RESTARTS.values(), ids=RESTARTS.keys())
def test_what_a_replica_is_made_of_changes_its_hash(change: str) -> None:
    assert hash_with(change) != hash_with("{}")


@pytest.mark.parametrize("change", KEEPS.values(), ids=KEEPS.keys())
def test_what_a_replica_does_not_know_of_keeps_its_hash(change: str) -> None:
    assert hash_with(change) == hash_with("{}")


def test_the_hash_covers_what_the_spec_only_names() -> None:
    spec = loaded().spec
    assert spec.replica_hash("one") != spec.replica_hash("two")
    assert spec.replica_hash() == spec_from_json(spec_to_json(spec)).replica_hash()


def test_an_order_of_preference_is_part_of_the_hash_and_any_other_order_is_not() -> None:
    spec = load_text(f"{SMALL}resources: {{accelerators: {{L4: 1, A100: 1}}}}").spec
    turned = replace(spec, resources=spec.resources[::-1])
    assert turned.replica_hash() == spec.replica_hash()
    in_order = replace(spec, resources_ordered=True)
    assert replace(turned, resources_ordered=True).replica_hash() != in_order.replica_hash()


# --- whatever the text -------------------------------------------------------------------------------------------


def survives(text: str, **options: object) -> None:
    try:
        spec = load_text(text, **options).spec  # type: ignore[arg-type]
    except SpecError as error:
        refusal = error
    else:
        assert sent_spec(json.loads(json.dumps(spec_to_json(spec)))) == spec
        return
    assert refusal.problems
    assert len(str(refusal).splitlines()) == len(refusal.problems)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    survives(text)
    survives(f"{SMALL}{text}")


KEYS = st.sampled_from(sorted({key for section in Section.__subclasses__() for key in section.model_fields}))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["L4", "L4:2", "aws/us-east-1", "$A", "${A:-1}", "/health", "8000-8010", "*", "k8s"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=25,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=8))
def test_any_tree_is_a_spec_or_a_spec_error(tree: dict[str, object]) -> None:
    survives(yaml.safe_dump(tree, allow_unicode=True))


REFERENCE = yaml.safe_load(reference_text())


def places(tree: object, way: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [way, *(place for key, inner in items for place in places(inner, (*way, key)))]


@pytest.mark.long
@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(places(REFERENCE)[1:]), TREES)
def test_the_reference_with_anything_anywhere_is_a_spec_or_a_spec_error(
    place: tuple[str | int, ...], junk
) -> None:
    tree = yaml.safe_load(reference_text())
    inside = tree
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = junk
    survives(yaml.safe_dump(tree, allow_unicode=True))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_override_is_taken_or_refused(override: str) -> None:
    survives(SMALL, set_overrides=[override, f"replicas={override}", f"{override}=1"])
