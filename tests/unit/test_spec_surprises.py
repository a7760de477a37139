"""Files that would not do what they say: a size that is fixed at 0, and values that YAML 1.1 reads as something else."""

from __future__ import annotations

import pytest

from skyserve_cli.spec import SpecError, sent_spec, spec_to_json
from skyserve_cli.spec.load import load_text

SMALL = "service: {}\nrun: serve\n"
MIN = "service.replica_policy.min_replicas"


def problems(text: str, *changes: str) -> list[str]:
    try:
        load_text(text, set_overrides=changes)
    except SpecError as error:
        return [str(each) for each in error.problems]
    return []


def policy(text: str) -> str:
    return f"service: {{replica_policy: {{{text}}}}}\nrun: serve\n"


# --- a size that is fixed at 0 ---


@pytest.mark.parametrize(
    ("text", "change", "cure"),
    [
        (policy("min_replicas: 0"), [], "write max_replicas: 1 and target_ongoing_requests_per_replica: 32"),
        (policy("min_replicas: 0, target_qps_per_replica: 2"), [], "write max_replicas: 1"),
        (policy("min_replicas: 0, slo: {ttft_ms: 500}"), [], "write max_replicas: 1"),
        (policy("min_replicas: 1"), ["replica_policy.min_replicas=0"], "write max_replicas: 1"),
        (policy('min_replicas: "${N}"') + "envs: {N: 0}\n", [], "write max_replicas: 1"),
        (
            policy("min_replicas: 0, schedule: [{cron: 0 8 * * *, duration: 2h, max_replicas: 0}]"),
            [],
            "write max_replicas: 1",
        ),
    ],
)
def test_a_size_that_no_request_can_raise_is_an_error_at_its_key(
    text: str, change: list[str], cure: str
) -> None:
    (problem,) = problems(text, *change)
    assert problem.startswith(f"{MIN}: needs max_replicas")
    assert cure in problem


@pytest.mark.parametrize(
    "text",
    [
        policy("min_replicas: 0, max_replicas: 1, target_ongoing_requests_per_replica: 32"),
        policy("min_replicas: 0, max_replicas: 3, target_qps_per_replica: 1"),
        policy("min_replicas: 0, schedule: [{cron: 0 8 * * *, duration: 2h, min_replicas: 1}]"),
        policy("min_replicas: 0, max_replicas: 0"),  # said in so many words
        "service: {replicas: 0}\nrun: serve\n",
    ],
)
def test_a_size_that_can_rise_or_is_0_on_purpose_is_right(text: str) -> None:
    assert problems(text) == []


def test_what_was_written_on_purpose_may_be_sent_to_the_controller() -> None:
    spec = load_text("service: {replicas: 0}\nrun: serve\n", name="a").spec
    assert sent_spec(spec_to_json(spec)) == spec


# --- variables, headers and labels are what was written ---

AS_WRITTEN = ("on", "yes", "No", "010", "1.10", "0x10", "12:30", "1_000", ".inf", "1e3", "0o7", "2024-01-01")


@pytest.mark.parametrize("value", AS_WRITTEN)
@pytest.mark.parametrize(
    "text",
    [
        "envs: {A: VALUE}\n" + SMALL,
        "envs:\n  A: VALUE\n" + SMALL,
        "envs:\n  <<: {A: VALUE}\n" + SMALL,
        "envs: {<<: [{B: 1}, {A: VALUE}]}\n" + SMALL,
        "secrets: &s {B: VALUE}\nenvs: {A: VALUE}\n" + SMALL,
    ],
    ids=["flow", "block", "merged", "merged list", "with secrets"],
)
def test_a_variable_is_the_text_that_was_written(text: str, value: str) -> None:
    assert dict(load_text(text.replace("VALUE", value)).spec.envs)["A"] == value


@pytest.mark.parametrize("value", AS_WRITTEN)
@pytest.mark.parametrize("change", ["envs.A=VALUE", "envs={A: VALUE}"])
def test_a_variable_of_the_command_line_is_the_text_that_was_written(value: str, change: str) -> None:
    spec = load_text(SMALL, set_overrides=[change.replace("VALUE", value)]).spec
    assert spec.envs == (("A", value),)


@pytest.mark.parametrize("value", AS_WRITTEN)
def test_headers_of_the_probe_and_labels_are_the_text_that_was_written(value: str) -> None:
    text = f"""
service: {{readiness_probe: {{path: /, headers: {{X-A: {value}}}}}}}
resources: {{labels: {{a: {value}}}, any_of: [{{labels: {{b: {value}}}}}]}}
run: serve
"""
    spec = load_text(text).spec
    assert spec.probe.headers == (("X-A", value),)
    assert spec.resources[0].labels == (("a", value), ("b", value))


@pytest.mark.parametrize(
    ("text", "path", "reading"),
    [
        ("resources: {ports: 8:30}\n" + SMALL, "resources.ports", "a number of base 60"),
        ("resources: {ports: 22:22}\n" + SMALL, "resources.ports", "a number of base 60"),
        ("resources: {disk_size: 0400}\n" + SMALL, "resources.disk_size", "the octal number 256"),
        ("num_nodes: 010\n" + SMALL, "num_nodes", "the octal number 8"),
        (policy("min_replicas: 012"), MIN, "the octal number 10"),
        (
            "service: {readiness_probe: {path: /, post_data: {n: 010}}}\nrun: serve\n",
            "service.readiness_probe.post_data.n",
            "octal",
        ),
        (
            "resources: {max_hourly_cost: 1:30.5}\n" + SMALL,
            "resources.max_hourly_cost",
            "a number of base 60",
        ),
    ],
)
def test_a_number_that_is_read_as_another_is_refused(text: str, path: str, reading: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"{path}: ")
    assert reading in problem


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("10", 10), ("0x10", 16), ("1_0", 10)])
def test_numbers_that_everybody_reads_alike_stay(text: str, expected: int) -> None:
    assert load_text(f"service: {{replicas: {text}}}\nrun: serve\n").spec.scaling.min_replicas == expected


def test_numbers_that_are_only_passed_on_may_be_octal() -> None:
    text = f"config: {{kubernetes: {{pod_config: {{spec: {{volumes: [{{secret: {{defaultMode: 0400}}}}]}}}}}}}}\n{SMALL}"
    assert problems(text) == []


def test_a_tag_that_the_text_does_not_fit_is_one_problem() -> None:
    (problem,) = problems(f"num_nodes: !!int 089\n{SMALL}")
    assert "cannot be read as a YAML int" in problem
