"""Every number of a profile has its source, and computed ones can be computed again."""

from __future__ import annotations

import pytest

from skyserve_cli.engine.profiles import (
    PROFILES,
    Profile,
    ProfileOrigin,
    UnknownProfile,
    describe,
    profile_named,
)

KIB, GB, GIB = 1024, 1e9, 2**30


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_parameter_is_printed_with_its_origin_and_source(profile: Profile) -> None:
    text = describe()
    parameters = dict(profile.parameters())
    assert len(parameters) == 11
    for name, parameter in parameters.items():
        assert parameter.source
        assert parameter.value > 0
        line = next(
            line for line in text.split(profile.name + ":")[1].splitlines() if line.split()[:1] == [name]
        )
        assert f"{parameter.value:g} {parameter.unit}" in line
        assert parameter.origin.value in line
        assert line.endswith(parameter.source)


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        pytest.param(
            "l4-8b",
            {
                "weights": 16 * GB / (300 * GB * 0.8) * 1e3,
                "per_context": 1000 * 128 * KIB / (300 * GB * 0.75) * 1e3,
                "kv_capacity": (24 * GB * 0.9 - 16 * GIB) / (128 * KIB),
            },
            id="l4-8b",
        ),
        pytest.param(
            "a100-7b",
            {
                "per_context": 1000 * 128 * KIB / (2039 * GB * 0.75) * 1e3,
                "kv_capacity": (80 * GB * 0.9 - 15 * GB) / (128 * KIB),
            },
            id="a100-7b",
        ),
        pytest.param(
            "h100-70b",
            {
                "per_context": 1000 * 320 * KIB / (4 * 3350 * GB * 0.75) * 1e3,
                "kv_capacity": (4 * 80 * GB * 0.9 - 141 * GB) / (320 * KIB),
            },
            id="h100-70b",
        ),
    ],
)
def test_computed_parameters_follow_from_bandwidth_and_sizes(name: str, computed: dict[str, float]) -> None:
    parameters = dict(PROFILES[name].parameters())
    for parameter, value in computed.items():
        assert parameters[parameter].origin is ProfileOrigin.COMPUTED
        assert parameters[parameter].value == pytest.approx(value, rel=0.03)


def test_an_iteration_takes_the_sum_of_its_parts() -> None:
    l4 = PROFILES["l4-8b"]
    assert l4.iteration_s(prefill_tokens=100, sequences=8, context_tokens=5_000) == pytest.approx(
        (67 + 0.55 * 100 + 0.25 * 8 + 0.58 * 5) / 1000
    )


def test_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(UnknownProfile, match=r"'l4'.*l4-8b, a100-7b, h100-70b"):
        profile_named("l4")
