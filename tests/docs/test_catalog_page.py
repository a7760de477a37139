"""The table of accelerators in docs/catalog.md matches the packaged catalog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from provisioners.offers.catalog import packaged

PAGE = Path(__file__).parents[2] / "docs" / "catalog.md"
CLOUDS = ("aws", "gcp", "azure")


def written() -> dict[str, dict[str, int]]:
    """Regions by accelerator and cloud. A row of two accelerators has their numbers in the same order."""
    _, _, table = PAGE.read_text().partition("| | AWS | Google Cloud | Azure |\n")
    found: dict[str, dict[str, int]] = {}
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for place, name in enumerate(names.split(", ")):
            numbers = [[int(one) for one in re.findall(r"(?:^|, )(\d+)", cell)] for cell in cells]
            found[name] = {c: n[place] for c, n in zip(CLOUDS, numbers, strict=True) if place < len(n)}
    return found


@pytest.mark.parametrize("accelerator", packaged().accelerators)
def test_the_table_has_the_regions_of_the_catalog(accelerator: str) -> None:
    regions: dict[str, set[str]] = {}
    for row in packaged().by_accelerator[accelerator]:
        regions.setdefault(row.zone.cloud, set()).add(row.zone.region)
    assert written()[accelerator] == {cloud: len(held) for cloud, held in regions.items()}


def test_the_table_has_no_accelerator_that_the_catalog_lacks() -> None:
    assert set(written()) == set(packaged().accelerators)
