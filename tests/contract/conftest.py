"""Every cloud, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioners.contract.subject import Subject
from tests.clouds.vms import vm_world
from tests.contract.contract_kubernetes import KubernetesSubject
from tests.contract.contract_lambda import LambdaSubject
from tests.contract.contract_rented import AwsSubject, AzureSubject, GcpSubject
from tests.contract.contract_ssh import Rack, SshSubject, rack_of
from tests.contract.contract_subjects import FakeSubject, FleetSubject, LocalSubject

pytest.register_assert_rewrite("provisioners.contract.suite", "provisioners.contract.troubles")

SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "aws": AwsSubject,
    "azure": AzureSubject,
    "fake": FakeSubject,
    "fleet": FleetSubject,
    "gcp": GcpSubject,
    "kubernetes": KubernetesSubject,
    "lambda": LambdaSubject,
    "local": LocalSubject,
}


@pytest.fixture(scope="session")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    why = vm_world.why_not()
    if why is not None:
        pytest.skip(why)
    with rack_of(tmp_path_factory.mktemp("rack")) as made:
        yield made


@pytest.fixture(params=[*sorted(SUBJECTS), pytest.param("ssh", marks=pytest.mark.long)])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    if request.param == "local" and not sys.platform.startswith("linux"):
        pytest.skip("the local cloud needs Linux")
    if request.param == "ssh":
        made: Subject = SshSubject(request.getfixturevalue("rack"))
    else:
        made = SUBJECTS[request.param](tmp_path)
    yield made
    made.close()
