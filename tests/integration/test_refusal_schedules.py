"""Random schedules of refusals, outages of a region and controllers that die, by seed, on each cloud's fake: in the end there is
one machine per replica and no other, no version is given up while one region takes it, and no market is asked more often
than its back-off allows. SKYSERVE_SCHEDULES=200 plays many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clouds.controller_life import live_through
from tests.clouds.schedules import by_decades
from tests.contract.contract_rented import AwsSubject, AzureSubject, GcpSubject, RentedSubject

pytestmark = pytest.mark.long

LAUNCHES_OF_A_MARKET = 8  # 10 s, doubling up to 5 minutes, in about half an hour


@pytest.mark.parametrize("cloud", [AwsSubject, GcpSubject, AzureSubject], ids=["aws", "gcp", "azure"])
@by_decades
def test_refusals_end_with_one_machine_per_replica(
    cloud: type[RentedSubject], seeds: range, tmp_path: Path
) -> None:
    for seed in seeds:
        subject = cloud(tmp_path)
        try:
            life = live_through(subject, seed)
            said = (
                f"seed {seed}: {life.fleet()}, {subject.billed()} billed, {life.launched}, {life.row().notes}"
            )
            assert not life.is_given_up(), said
            assert life.is_whole(), said
            assert max(life.launched.values()) <= LAUNCHES_OF_A_MARKET, said
        finally:
            subject.close()
            if "life" in locals():
                life.store.close()
