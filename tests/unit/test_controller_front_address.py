"""Where an endpoint beside the controller is, and who can reach it."""

from __future__ import annotations

import pytest

from skyserve_cli.controller.balancers.front_address import choose_port, reach_of, shown_host

PORTS = range(30001, 30005)


@pytest.mark.parametrize(
    ("endpoint", "reach"),
    [
        ("http://127.0.0.1:30001", "this_machine"),
        ("http://127.8.0.1:30001", "this_machine"),
        ("https://[::1]:30001", "this_machine"),
        ("http://localhost:30001", "this_machine"),
        ("http://10.0.0.7:30001", "network"),
        ("https://chat.example.com:8000", "network"),
        ("", None),
    ],
)
def test_who_can_reach_an_endpoint(endpoint: str, reach: str | None) -> None:
    assert reach_of(endpoint) == reach


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.7", "::1", "gpu-1.example.com"])
def test_a_host_is_shown_as_it_is(host: str) -> None:
    assert shown_host(host) == host


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_is_shown_as_an_address_that_can_be_dialled(wildcard: str) -> None:
    assert shown_host(wildcard) not in ("0.0.0.0", "::", "")


@pytest.mark.parametrize(
    ("had", "taken", "remembered", "in_use", "chosen"),
    [
        pytest.param(None, [], [], [], 30001, id="the first"),
        pytest.param(30003, [], [], [], 30003, id="the one the name had"),
        pytest.param(8080, [], [], [], 8080, id="the one the name had, although it was chosen by a file"),
        pytest.param(30003, [30003], [], [], 30001, id="another service has it now"),
        pytest.param(30003, [], [], [30003], 30001, id="another program has it now"),
        pytest.param(None, [30001], [30002], [], 30003, id="not that of a name that is down"),
        pytest.param(None, [30001, 30003, 30004], [30002], [], 30002, id="that of a name that is down, as the last"),
        pytest.param(30002, [30001, 30003], [], [30002, 30004], None, id="none is left"),
    ],
)  # fmt: skip
def test_the_port_of_a_name(
    had: int | None, taken: list[int], remembered: list[int], in_use: list[int], chosen: int | None
) -> None:
    port = choose_port(
        PORTS, had=had, taken=taken, remembered=remembered, is_free=lambda port: port not in in_use
    )
    assert port == chosen
