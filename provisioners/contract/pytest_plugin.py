"""The option `--skyserve-cloud` and the fixture `subject`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from provisioners.contract.subject import Subject

pytest.register_assert_rewrite("provisioners.contract.suite", "provisioners.contract.troubles")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skyserve-cloud", metavar="MODULE:NAME", help="what makes the cloud that is tested (a Subject)"
    )


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A fresh cloud for each test."""
    where = request.config.getoption("--skyserve-cloud")
    module, _, name = (where or "").partition(":")
    if not name:
        raise pytest.UsageError("name the cloud that is tested: --skyserve-cloud=MODULE:NAME")
    made: Subject = getattr(import_module(module), name)()
    yield made
    made.close()
