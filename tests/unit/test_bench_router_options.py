"""The options of `benchmarks.router`: what they are read as, and which systems take part."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.router.cells import BY_NAME, CELLS, EXTRA, Cell
from benchmarks.router.choice import chosen, makers
from benchmarks.router.keys import LIMITED, NO_KEYS, Keys, client_key
from benchmarks.router.machine import Missing
from benchmarks.router.options import parse
from benchmarks.router.ours import described
from benchmarks.router.run import LOAD_CORE, PROXY_CORE, Plan
from benchmarks.router.systems import Group
from lb.config.options import Access

LOCAL = {"skyserve", "skyserve-off", "skyserve-nameless", "skyserve-gorgo"}
REGIONAL = {"regional", "regional-off", "regional-nameless", "regional-gorgo", "regional-linked"}
OTHERS = {"sglang-router", "smg", "vllm-router", "envoy", "nginx", "direct"}


@pytest.mark.parametrize(
    ("text", "keys", "shown"),
    [
        pytest.param("none", NO_KEYS, "none", id="no key"),
        pytest.param("open", Keys(1), "open", id="a key without limits"),
        pytest.param("limited", LIMITED, "limited", id="a key with limits"),
        pytest.param("1000", Keys(1000, limited=True), "1000 limited", id="a thousand in turn"),
    ],
)
def test_keys_are_read_and_shown(text: str, keys: Keys, shown: str) -> None:
    given = parse(["--keys", text])
    assert given.keys == keys
    assert str(given.keys) == shown


@pytest.mark.parametrize("text", ["0", "-1", "some", "1000001", ""])
def test_other_keys_are_rejected(text: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--keys", text])


def test_an_agent_takes_the_keys_that_requests_have() -> None:
    access = Access.from_json(Keys(3, limited=True).access())
    assert [key.sha256 for key in access.keys] == [
        sha256(client_key(number).encode()).hexdigest() for number in range(3)
    ]
    assert all(key.limits.counts_tokens for key in access.keys)
    assert not any(key.limits.counts_tokens for key in Access.from_json(Keys(1).access()).keys)
    assert Access.from_json(NO_KEYS.access()) == Access()


@pytest.mark.parametrize(
    ("keys", "extras"),
    [(NO_KEYS, LIMITED), (Keys(1), Keys(1)), (Keys(1000, limited=True), Keys(1000, limited=True))],
)
def test_the_cell_with_extras_has_keys(keys: Keys, extras: Keys) -> None:
    assert keys.for_extras() == extras


@pytest.mark.parametrize(
    ("arguments", "tls"),
    [
        pytest.param([], "none", id="plain"),
        pytest.param(["--agent", "regional"], "targets", id="as regions have it"),
        pytest.param(["--agent", "both"], "none", id="both in one run"),
        pytest.param(["--agent", "regional", "--tls", "none"], "none", id="what is given counts"),
        pytest.param(["--tls", "both"], "both", id="on both sides"),
    ],
)
def test_tls_follows_the_agent(arguments: list[str], tls: str) -> None:
    assert parse(arguments).tls == tls


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        pytest.param([], LOCAL | {"skyserve-keyed"}, id="local"),
        pytest.param(["--agent", "regional"], REGIONAL | {"regional-keyed"}, id="regional"),
        pytest.param(["--agent", "both"], LOCAL | REGIONAL | {"skyserve-keyed", "regional-keyed"}, id="both"),
        pytest.param(["--keys", "open"], LOCAL, id="all have keys: none is the keyed one"),
        pytest.param(
            ["--also", "before=elsewhere", "--variant", "held=--hold 60"],
            LOCAL | {"skyserve-keyed", "before", "held"},
            id="labels",
        ),
    ],
)
def test_the_systems_of_a_run(arguments: list[str], own: set[str]) -> None:
    assert set(makers(parse(arguments))) == own | OTHERS


def test_a_system_that_there_is_not_is_named() -> None:
    with pytest.raises(Missing, match="no system regional; there are skyserve,"):
        chosen(parse(["--systems", "skyserve,regional"]))


@pytest.mark.parametrize(("workers", "cores"), [(1, (PROXY_CORE, LOAD_CORE)), (2, (None, None))])
def test_several_workers_are_not_pinned(workers: int, cores: tuple[int | None, int | None]) -> None:
    plan = Plan([], [], 1, 1.0, 1.0, 0, workers=parse(["--workers", str(workers)]).workers)
    assert (plan.core(PROXY_CORE), plan.core(LOAD_CORE)) == cores


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--workers", "many"],
        ["--only", "nothing"],
        ["--tls", "all"],
        ["--agent", "regional", "--variant", "held=--hold 60"],
    ],
)
def test_other_values_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)


def test_what_is_measured_only_by_name_exists() -> None:
    assert set(EXTRA) < set(BY_NAME)
    assert len(BY_NAME) == len(CELLS)
    assert all(cell.beside in ("", *BY_NAME) for cell in CELLS)
    assert all(cell.beside for cell in CELLS if cell.share_of_maximum)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.mode == "unary"], ids=lambda cell: cell.name)
def test_bodies_have_their_size(cell: Cell, tmp_path: Path) -> None:
    lines = cell.load_arguments(tmp_path, 0.1, 0.1)
    (file,) = tmp_path.glob("*.bodies")
    assert str(file) in lines
    bodies = file.read_bytes().splitlines()
    size = cell.body_bytes
    assert all(0.9 * size <= len(body) <= 1.1 * size for body in bodies)
    assert json.loads(bodies[0])["max_tokens"] == 160
    grouped = cell.group is Group.PREFIX
    assert len(bodies) == (cell.groups * cell.questions if grouped else 1)


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        pytest.param(
            {"kind": "native", "fast_path": True, "not_compiled": ""},
            ("native", "in C", "in C"),
            id="compiled",
        ),
        pytest.param(
            {"kind": "native", "fast_path": True, "slow_tls": "no OpenSSL"},
            ("native", "in C", "in Python (no OpenSSL)"),
            id="TLS in Python",
        ),
        pytest.param(
            {"kind": "interpreted", "fast_path": False, "not_compiled": "no compiler"},
            ("interpreted (no compiler)", "in Python", "in Python"),
            id="interpreted, with the reason",
        ),
        pytest.param({}, ("unknown", "unknown", "unknown"), id="an agent that reports none"),
    ],
)
def test_a_build_is_described_by_the_agent(build: dict[str, object], shown: tuple[str, ...]) -> None:
    assert tuple(described(build).values()) == shown
