"""The pages about the load balancer match its options, policies, reasons, flags and paths."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lb.__main__ import main
from lb.agent.admin_api import admin_app
from lb.stream.resume_rules import Reason
from policies.routing.registry import POLICIES
from skyserve_cli.spec import LoadBalancerSpec, ServiceSpec
from skyserve_cli.spec.front_door import CorsSection
from skyserve_cli.spec.load import load_text

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "howto" / "load-balancer.md").read_text()
CORS = (DOCS / "howto" / "tls-and-api-keys.md").read_text()
SGLANG = (DOCS / "migrating.md").read_text().partition("## From sglang-router\n")[2]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_line(name: str) -> None:
    default = " (default)" if name == ServiceSpec("", "").load_balancing_policy else ""
    assert f"| `{name}`{default} |" in PAGE


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_not_to_continue_a_stream_has_a_line(reason: Reason) -> None:
    table = PAGE.partition("| reason | the stream |")[2].partition("\n\n")[0]
    assert f"`{reason.value}`" in table


def test_the_knobs_shown_are_the_defaults() -> None:
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    balancer = shown["service"]["load_balancer"]
    del balancer["api_keys"], balancer["pushing"]
    spec = load_text(yaml.safe_dump(shown | {"run": "serve"})).spec
    plain = LoadBalancerSpec()
    assert [
        one.name for one in fields(plain) if getattr(plain, one.name) != getattr(spec.load_balancer, one.name)
    ] == []


def test_the_flags_named_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    ours = re.findall(
        r"--[a-z][a-z-]+", " ".join(row.split("|")[2] for row in SGLANG.splitlines() if row.startswith("|"))
    )
    assert ours
    assert set(ours) - known == set()


def test_the_paths_named_are_paths_of_the_admin_port() -> None:
    named = set(re.findall(r"`(?:[A-Z]+ )?(/-/[a-z]+|/[a-z]+_worker|/workers)", PAGE + SGLANG)) - {
        "/-/healthz"
    }
    source = Path(admin_app.__code__.co_filename).read_text()
    assert len(named) >= 5
    assert [path for path in sorted(named) if f'"{path}"' not in source and f'"{path}/' not in source] == []


def test_the_options_of_cors_are_shown_with_their_defaults() -> None:
    table = CORS.partition("| `load_balancer.cors` | default |")[2].partition("\n\n")[0]
    shown = {
        name: yaml.safe_load(value)
        for name, value in re.findall(r"^\| `(\w+)` \| `([^`]+)`", table, re.MULTILINE)
    }
    assert shown == CorsSection().model_dump(mode="json")
