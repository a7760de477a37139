"""Which redirects a probe follows."""

from __future__ import annotations

import pytest

from skyserve_cli.controller.readiness import redirected
from skyserve_cli.spec.model import Probe

HERE = "http://h:8000"


@pytest.mark.parametrize(
    ("endpoint", "status", "location", "path"),
    [
        pytest.param(HERE, 307, "/health/", "/health/", id="a path"),
        pytest.param(HERE, 301, "http://h:8000/health/?a=1", "/health/?a=1", id="a whole URL"),
        pytest.param(HERE, 308, "ready", "/ready", id="beside it"),
        pytest.param("http://h", 302, "http://h:80/x", "/x", id="the same port, written out"),
        pytest.param("https://h:8443/llm", 307, "/llm/x", "/x", id="below a prefix"),
        pytest.param("https://h:8443/llm", 307, "/x", None, id="out of the prefix"),
        pytest.param(HERE, 307, "https://h:8000/x", None, id="another scheme"),
        pytest.param(HERE, 307, "http://h:8001/x", None, id="another port"),
        pytest.param(HERE, 307, "//evil/x", None, id="another host"),
        pytest.param(HERE, 307, "", None, id="nowhere"),
        pytest.param(HERE, 300, "/x", None, id="a choice"),
        pytest.param(HERE, 304, "/x", None, id="not modified"),
        pytest.param(HERE, 200, "/x", None, id="no redirect"),
    ],
)
def test_where_a_redirect_leads(endpoint: str, status: int, location: str, path: str | None) -> None:
    followed = redirected(endpoint, Probe("/health"), status, location)
    assert (None if followed is None else followed.path) == path


def test_a_redirect_keeps_the_body_or_becomes_get_as_clients_do() -> None:
    probe = Probe("/v1", post_data="{}", headers=(("X", "y"),))
    kept, fetched = redirected(HERE, probe, 307, "/v1/"), redirected(HERE, probe, 303, "/v1/")
    assert kept is not None
    assert fetched is not None
    assert (kept.method, fetched.method) == ("POST", "GET")
    assert kept.headers == fetched.headers == probe.headers
