"""The validator of the make-believe Google Cloud finds what the real one would refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clouds.gcp.gcp_discovery import answer_problems, read

INSTANCES = "/compute/v1/projects/p-1/zones/us-central1-a/instances"
GOOD: dict[str, Any] = {
    "name": "r1",
    "machineType": "zones/us-central1-a/machineTypes/g2-standard-8",
    "scheduling": {"provisioningModel": "SPOT", "automaticRestart": False},
    "disks": [{"boot": True, "initializeParams": {"diskSizeGb": "100"}}],
}


def problems(verb: str, url: str, body: Any = None) -> list[str]:
    return read(verb, url, b"" if body is None else json.dumps(body).encode())[3]


def test_a_good_request_is_good() -> None:
    assert problems("POST", f"{INSTANCES}?requestId=abc&alt=json", GOOD) == []


BAD = {
    "unknown method": ("PUT", INSTANCES, None, "there is no method"),
    "unknown query": ("POST", f"{INSTANCES}?requestid=x", GOOD, "no such parameter"),
    "ill-typed query": ("GET", f"{INSTANCES}?maxResults=many", None, "no uint32"),
    "path out of pattern": ("GET", f"{INSTANCES}/R_1", None, "is not like"),
    "field in the wrong case": (
        "POST",
        INSTANCES,
        GOOD | {"machinetype": "x"},
        "machinetype: there is no such field",
    ),
    "unknown field within": ("POST", INSTANCES, GOOD | {"scheduling": {"preemptable": True}}, "preemptable"),
    "number for a long": (
        "POST",
        INSTANCES,
        GOOD | {"disks": [{"initializeParams": {"diskSizeGb": 100}}]},
        "no string",
    ),
    "no number in a long": (
        "POST",
        INSTANCES,
        GOOD | {"disks": [{"initializeParams": {"diskSizeGb": "x"}}]},
        "no int64",
    ),
    "word for a boolean": ("POST", INSTANCES, GOOD | {"canIpForward": "yes"}, "no boolean"),
    "unknown enumerator": (
        "POST",
        INSTANCES,
        GOOD | {"scheduling": {"provisioningModel": "SPOTTY"}},
        "SPOTTY",
    ),
    "field of answers": ("POST", INSTANCES, GOOD | {"status": "RUNNING"}, "is for answers only"),
    "object for a list": ("POST", INSTANCES, GOOD | {"disks": {}}, "is no list"),
    "bad name": ("POST", INSTANCES, GOOD | {"name": "R_1"}, "is not like"),
    "body without use": ("DELETE", f"{INSTANCES}/r1", GOOD, "takes no body"),
}


@pytest.mark.parametrize(("verb", "url", "body", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_is_refused(verb: str, url: str, body: Any, said: str) -> None:
    assert said in " ".join(problems(verb, url, body))


def test_an_answer_that_is_none_is_found() -> None:
    _, method, api, _ = read("GET", f"{INSTANCES}/r1", b"")
    assert api is not None
    assert answer_problems(method, api, {"name": "r1", "status": "RUNNING"}) == []
    assert len(answer_problems(method, api, {"name": 1, "status": "FINE", "colour": "red"})) == 3
