"""Filling the cache of a new replica: what is sampled, whose prompts go where, what ends it, and who is offered meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lb.config.options import Access, ApiKey, Pushing, PushMode, Warming
from lb.config.regions import Regions
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.queue import RequestQueue
from lb.core.residency import ANYWHERE
from lb.core.scheduler import Scheduler
from lb.core.target_choice import choose
from lb.core.targets import Health, TargetTable
from lb.core.warming import (
    SAMPLE_EVERY_S,
    SAMPLES,
    SAMPLES_BYTES,
    SAMPLES_KEPT_S,
    PromptSample,
    PromptSamples,
    Surroundings,
    WarmingEnd,
    WarmingStep,
    WarmUp,
    new_replicas,
)
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.stream.openai_request import prompt_of
from lb.stream.warming_request import warming_body
from policies.routing.base import RequestView
from policies.routing.registry import POLICIES
from tests.kit.request_views import changed

PROMPT = b"p" * 4000
REQUEST = RequestView("r", "POST", "/v1/chat/completions", prompt=PROMPT, scope="\x00m")


def sample(
    at: float = 0.0, text: bytes = PROMPT, zones: frozenset[str] = ANYWHERE, model: str = "m", body: int = 100
) -> PromptSample:
    return PromptSample(at, f"\x00{model}", zones, model, CHAT, b"b" * body, text)


def table(**rest: Any) -> Table:
    return Table("s", "1", **rest)


# --- the sample --------------------------------------------------------------------------------------------------


def test_a_sample_is_due_once_a_second() -> None:
    samples = PromptSamples(table())
    assert samples.due_at < 0.0
    samples.add(sample(5.0))
    assert samples.due_at == 5.0 + SAMPLE_EVERY_S


def test_the_sample_is_bounded_in_number_bytes_and_age() -> None:
    samples = PromptSamples(table())
    for number in range(SAMPLES + 10):
        samples.add(sample(float(number)))
    assert len(samples) == SAMPLES
    for number in range(100):
        samples.add(sample(300.0 + number, b"q" * 200_000, body=200_000))
    assert len(samples) == SAMPLES_BYTES // 400_000
    samples.add(sample(400.0, body=300_000))
    assert len(samples) == SAMPLES_BYTES // 400_000  # too large to be kept
    assert samples.steps((), (), 399.0 + SAMPLES_KEPT_S) == []
    assert len(samples) == 1


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        pytest.param(table(), True, id="the same rules"),
        pytest.param(table(targets=(Target("a", "http://a:1"),)), True, id="another target"),
        pytest.param(table(residency=("eu",)), False, id="another residency of the entrance"),
        pytest.param(table(access=Access((ApiKey("acme", "0" * 64),))), True, id="another key"),
        pytest.param(
            table(access=Access((ApiKey("acme", "0" * 64, residency="eu"),))),
            False,
            id="a key with a residency",
        ),
        pytest.param(table(warming=Warming(0.0)), False, id="no warming"),
    ],
)
def test_what_is_known_is_dropped_when_it_could_belong_elsewhere(other: Table, kept: bool) -> None:
    samples = PromptSamples(table())
    samples.add(sample())
    samples.apply(other)
    assert len(samples) == kept


def test_without_warming_no_sample_is_due() -> None:
    samples = PromptSamples(table(warming=Warming(0.0)))
    assert samples.due_at == float("inf")
    samples.apply(table())
    assert samples.due_at < 0.0


ZONES = {
    "of no zone, to any": (frozenset(), (), True),
    "of no zone, to a replica of a zone": (frozenset(), ("eu",), True),
    "of a zone, to a replica of it": (frozenset({"eu"}), ("eu", "north"), True),
    "of a zone, to a replica of none": (frozenset({"eu"}), (), False),
    "of a zone, to a replica of another": (frozenset({"eu"}), ("us",), False),
    "of two zones, to a replica of one": (frozenset({"eu", "north"}), ("eu",), False),
}


@pytest.mark.parametrize(("zones", "served", "sent"), ZONES.values(), ids=ZONES.keys())
def test_prompts_of_a_zone_stay_in_it(zones: frozenset[str], served: tuple[str, ...], sent: bool) -> None:
    samples = PromptSamples(table())
    for at in range(2):
        samples.add(sample(float(at), zones=zones))
    assert bool(samples.steps(served, (), 2.0)) == sent


def test_a_replica_gets_prompts_of_its_models_only() -> None:
    samples = PromptSamples(table())
    for at in range(2):
        samples.add(sample(float(at), model="m"))
        samples.add(sample(float(at), b"q" * 2000, model="n"))
    steps = samples.steps((), {"m"}, 2.0)
    assert samples.models() == {"m", "n"}
    assert [(one.sample.model, one.length) for one in steps] == [("n", 2000)]
    assert len(samples.steps((), (), 2.0)) == 2


# --- step by step ------------------------------------------------------------------------------------------------


def steps(number: int) -> list[WarmingStep]:
    return [WarmingStep(sample(), 4000, 4000)] * number


AROUND = {
    "all is well": (Surroundings(), WarmingStep),
    "requests wait": (Surroundings(pressed=True), None),
    "no other target is good": (Surroundings(others=False), WarmingEnd.NEEDED),
    "it has been ejected": (Surroundings(ready=False), WarmingEnd.GONE),
    "the agent drains": (Surroundings(stopping=True), WarmingEnd.STOPPED),
    "the agent drains and requests wait": (Surroundings(stopping=True, pressed=True), WarmingEnd.STOPPED),
}


@pytest.mark.parametrize(("around", "expected"), AROUND.values(), ids=AROUND.keys())
def test_what_comes_next(around: Surroundings, expected: Any) -> None:
    found = WarmUp(steps(2), 10.0, 15.0).next(around, 11.0)
    assert isinstance(found, WarmingStep) if expected is WarmingStep else found is expected


def test_one_request_at_a_time_until_all_are_done() -> None:
    up = WarmUp(steps(2), 0.0, 15.0)
    assert isinstance(up.next(Surroundings(), 0.0), WarmingStep)
    assert up.next(Surroundings(), 1.0) is None
    up.ended(True)
    assert isinstance(up.next(Surroundings(), 1.0), WarmingStep)
    assert up.next(Surroundings(), 2.0) is None
    up.ended(True)
    assert up.next(Surroundings(), 2.0) is WarmingEnd.COMPLETE
    assert (up.done, up.total) == (2, 2)


def test_time_ends_it_in_the_middle_of_a_request_too() -> None:
    up = WarmUp(steps(2), 0.0, 15.0)
    up.next(Surroundings(), 0.0)
    assert up.next(Surroundings(), 14.9) is None
    assert up.next(Surroundings(), 15.0) is WarmingEnd.TIME


def test_two_failures_in_a_row_end_it_and_one_does_not() -> None:
    up = WarmUp(steps(5), 0.0, 15.0)
    for succeeded in (False, True, False, False):
        assert isinstance(up.next(Surroundings(), 0.0), WarmingStep)
        up.ended(succeeded)
    assert up.next(Surroundings(), 0.0) is WarmingEnd.FAILED


# --- which targets are new ---------------------------------------------------------------------------------------


def of(*regions: str, here: str | None = "us") -> Table:
    targets = tuple(
        Target(f"{region}-{at}", "http://t:1", region=region) for at, region in enumerate(regions)
    )
    return table(targets=targets, regions=None if here is None else Regions("a", here))


NEW = {
    "one agent": (of("us", here=None), of("us", "eu", here=None), ["eu-1"], ["eu-1"]),
    "of the own region": (of("us"), of("us", "us"), ["us-1"], ["us-1"]),
    "the first of the own region": (of(), of("us"), ["us-0"], ["us-0"]),
    "another one of an owned region": (of("us", "eu"), of("us", "eu", "eu"), ["eu-2"], ["eu-2"]),
    "a region that was taken over": (of("us"), of("us", "eu", "eu"), ["eu-1", "eu-2"], []),
}


@pytest.mark.parametrize(("before", "after", "added", "expected"), NEW.values(), ids=NEW.keys())
def test_a_region_that_changes_hands_brings_no_new_replica(
    before: Table, after: Table, added: list[str], expected: list[str]
) -> None:
    assert new_replicas(before, after, added) == expected


# --- who is offered meanwhile --------------------------------------------------------------------------------------


def warmed(policy: str, mode: PushMode = PushMode.FIXED_CAP, cap: int = 1) -> TargetTable:
    """Two targets that take `cap` requests each; the second is being warmed."""
    targets = (Target("old", "http://a:1"), Target("new", "http://b:1"))
    it = TargetTable(table(targets=targets, policy=policy, pushing=Pushing(mode, cap)), 0.0)
    key = it.key("new")
    assert key is not None
    it.warm(key, True)
    return it


@pytest.mark.parametrize("policy", POLICIES)
def test_a_target_that_is_warmed_is_used_only_where_no_other_has_room(policy: str) -> None:
    it = warmed(policy)
    for _ in range(3):
        choice = choose(it, REQUEST, 0.0)
        assert choice is not None
        assert choice.target_id == "old"
    it.book(REQUEST, "old", 0.0)
    overflow = choose(it, changed(REQUEST, id="s"), 0.0)
    assert overflow is not None
    assert overflow.target_id == "new"
    it.book(changed(REQUEST, id="s"), "new", 0.0)
    assert not it.admits(0.0)


def test_no_request_waits_for_it() -> None:
    """Also where requests wait for the best target: while the other one has enough to do, it takes them."""
    it = warmed("gorgo", PushMode.WORK)
    for number in range(49):
        it.book(changed(REQUEST, id=f"before {number}"), "old", 0.0)
    for name, running, pending in (("old", 40, 9), ("new", 0, 0)):
        key = it.key(name)
        assert key is not None
        it.loaded(key, EngineLoad(running=running, pending=pending), 0.5, 0.5)
    choice = Scheduler[Waiting](it, RequestQueue()).place(Waiting(REQUEST), 0.5)
    assert choice is not None
    assert (choice.target_id, choice.wait) == ("new", False)


class Waiting:
    tried: tuple[int, ...] = ()
    has_priority = False
    queue_left_s = 10.0
    tenant = ""
    weight = 1.0
    policy = None
    pin = ""

    def __init__(self, view: RequestView) -> None:
        self.view = view


def test_a_request_that_the_others_failed_goes_to_it() -> None:
    it = warmed("least_load")
    booking = it.book(REQUEST, "old", 0.0)
    it.release(booking, 0.0)
    choice = choose(it, REQUEST, 0.0, (booking.epoch,))
    assert choice is not None
    assert choice.target_id == "new"


def test_a_target_that_is_warmed_is_good_and_ready() -> None:
    it = warmed("least_load")
    key = it.key("new")
    assert key is not None
    assert it.health(key, 0.0) is Health.WARMING
    assert it.healthy(0.0) == {"old", "new"}
    assert list(it.warming) == ["new"]
    it.warm(key, False)
    assert it.health(key, 0.0) is Health.GOOD
    assert not it.warming
    it.warm(key, True)
    it.apply(replace(it.table, targets=it.table.targets[:1]), 1.0)
    assert not it.warming
    it.warm(key, False)  # it has left: nothing happens


@pytest.mark.parametrize("policy", ["cache_aware", "gorgo", "prefix_tree"])
def test_the_policy_sends_there_what_has_been_computed(policy: str) -> None:
    it = warmed(policy, cap=100)
    key = it.key("new")
    assert key is not None
    it.cached(key, RequestView("", "POST", "/", prompt=PROMPT[:3200], scope="\x00m"), 0.0)
    it.warm(key, False)
    choice = choose(it, REQUEST, 0.0)
    assert choice is not None
    assert (choice.target_id, choice.matched_bytes) == ("new", 3200)
    assert it.in_flight == 0


# --- the request -------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "What is the weather in Oslo?"}
SYSTEM = {"role": "system", "content": "You are brief. " * 100}


def begun(json_: dict[str, Any], length: int, path: bytes = CHAT) -> Any:
    body = warming_body(path, json.dumps(json_).encode(), length)
    return None if body is None else json.loads(body)


def shared(*bodies: dict[str, Any]) -> int:
    """How many bytes the prompts of the bodies have in common."""
    one, other = (prompt_of(body, b"") for body in bodies)
    return next(at for at in range(len(one) + 1) if one[:at] != other[:at] or at == len(one)) - 1


def test_the_text_is_cut_where_the_prefix_ends() -> None:
    one = {"model": "m", "messages": [SYSTEM, USER]}
    other = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "What is new?"}]}
    found = begun(one, shared(one, other))
    assert found["messages"] == [SYSTEM, {"role": "user", "content": "What is "}]
    assert (found["max_tokens"], found["stream"], found["model"]) == (1, False, "m")


@pytest.mark.parametrize("length", range(0, 1600, 7))
def test_what_is_sent_begins_the_prompt(length: int) -> None:
    whole = {"messages": [SYSTEM, USER, {"role": "assistant", "content": "Wet, été."}, USER]}
    found = begun(whole, length)
    if found is not None:
        prompt, sent = prompt_of(whole, b""), prompt_of(found, b"").rstrip(b"\x1e")
        assert prompt.startswith(sent)
        assert length - 12 <= len(sent) <= length + 1 or found["messages"] == whole["messages"]


def test_a_message_of_parts_is_sent_whole_or_not_at_all() -> None:
    image = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "text", "text": "this"}]}
    body = {"messages": [SYSTEM, image]}
    whole = len(prompt_of(body, b""))
    assert begun(body, whole)["messages"] == [SYSTEM, image]
    assert begun(body, whole - 3)["messages"] == [SYSTEM]
    assert begun({"messages": [image]}, 4) is None


def test_only_what_makes_the_prompt_is_sent() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "model": "m", "messages": [SYSTEM, USER], "tools": tools, "tool_choice": "required", "user": "ann",
        "stream": True, "n": 4, "max_completion_tokens": 900, "response_format": {"type": "json_object"},
        "cache_salt": "x", "metadata": {"a": 1}, "min_tokens": 5, "seed": 1,
    }  # fmt: skip
    found = begun(body, 1000)
    assert set(found) == {"model", "messages", "tools", "cache_salt", "max_tokens", "stream", "temperature"}
    assert begun(body | {"tool_choice": "none"}, 1000)["tool_choice"] == "none"


def test_a_completion_is_cut_between_characters() -> None:
    assert begun({"prompt": "aéé"}, 4, COMPLETIONS)["prompt"] == "aé"
    assert begun({"prompt": [1, 2, 3]}, 4, COMPLETIONS) is None
    assert begun({"prompt": "a"}, 0, COMPLETIONS) is None


@pytest.mark.parametrize(
    ("kind", "priority"),
    [
        (EngineKind.VLLM, 1_000_000),
        (EngineKind.TRTLLM, 0.0),
        (EngineKind.SGLANG, None),
        (EngineKind.UNKNOWN, None),
    ],
)
def test_engines_with_priorities_get_the_lowest(kind: EngineKind, priority: float | None) -> None:
    body = warming_body(COMPLETIONS, b'{"prompt": "abc", "priority": -5}', 3, kind)
    assert body is not None
    assert json.loads(body).get("priority") == priority
